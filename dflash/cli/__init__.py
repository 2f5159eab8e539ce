"""`dflash …`: the application in `app`, one file a command; they share `arguments`, `loading` and `terminal`."""


def main() -> None:
    """Runs the command line."""
    from .app import main as run  # it loads all commands, and the modules of this folder need none

    run()
