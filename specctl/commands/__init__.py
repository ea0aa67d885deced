"""Typer commands: thin, and free of torch until a command runs."""
