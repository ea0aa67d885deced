"""Schemas and other grammars: compiled within bounds, and what was written checked against them."""
