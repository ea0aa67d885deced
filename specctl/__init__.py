"""Speculative decoding with draft models that know when to stop."""

__version__ = "0.1.0"
