"""Drafts that are copied from where the text occurred before."""
