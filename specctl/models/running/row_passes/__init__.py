"""Passes of torch over several sequences."""
