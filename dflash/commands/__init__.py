"""Sub-commands that are more than a few lines: one file each, registered in `dflash.cli`."""
