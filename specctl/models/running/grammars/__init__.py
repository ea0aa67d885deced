"""Schemas and other grammars: compiled with limits, and finished texts checked against them."""
