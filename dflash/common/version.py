"""The version of the package: of its distribution, its results and the folders that it writes."""

__version__ = "0.1.0"
