"""Runs settings on prompts and records the results."""
