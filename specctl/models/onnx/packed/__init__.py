"""Graphs over the tokens of several sequences."""
