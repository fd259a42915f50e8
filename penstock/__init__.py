"""The small core every other package may import: errors, configuration, storage, digests, user code."""

__version__ = "0.1.0"
