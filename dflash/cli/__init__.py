"""`dflash …`: the application in `app`, one file a command; they share `arguments`, `loading` and `terminal`."""


def main() -> None:
    """Runs the command line."""
    from .app import main as run  # loads all commands, which whoever asks for one of these modules does not need

    run()
