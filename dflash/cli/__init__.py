"""`dflash …`: `main` holds the application, each other file one command, `options` and `terminal` what they share."""
