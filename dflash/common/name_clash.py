"""Distributions that provide the import name `dflash`: the registry's `dflash` is the paper's code, not this one."""

from importlib import metadata


def import_name_clash() -> str | None:
    """One sentence with the remedy if the distribution `dflash` is installed too, else `None`."""
    try:
        version = metadata.version("dflash")
    except metadata.PackageNotFoundError:
        return None
    return (
        f"Two distributions provide the package 'dflash': dflash {version} (the paper's code) and dflash-transformers; each "
        "overwrites files of the other. Run `pip uninstall -y dflash dflash-transformers`, then install the one you want, "
        "or keep them in two virtual environments."
    )
