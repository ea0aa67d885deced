"""Prompts: benchmark suites, their formats, and where they are read from."""
