"""`python -m dflash` is `dflash`."""

from .cli import main


main()
