"""`python -m dflash.cli` is `dflash`, as it was before `python -m dflash`."""

from . import main


main()
