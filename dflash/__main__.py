"""`python -m dflash` is `dflash`."""

from .cli.main import main


main()
