"""Helpers of all other subpackages, which import them file by file. Nothing here imports another subpackage."""
