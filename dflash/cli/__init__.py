"""`dflash …`: the application in `main`, one file a command; they share `arguments`, `loading` and `terminal`."""
