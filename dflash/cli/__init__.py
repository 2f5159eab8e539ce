"""`dflash …`: the application in `main`, what commands share in `options` and `terminal`, one file a command."""
