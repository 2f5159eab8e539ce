"""The command line `dflash …`. Each command has a file, `app` collects them, and the other files are shared by them."""


def main() -> None:
    """Runs the command line."""
    # Imported here because it loads all commands, which the other modules of this folder do not need.
    from .app import main as run

    run()
