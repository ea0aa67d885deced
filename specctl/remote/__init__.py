"""Asks a server that speaks OpenAI's interface."""
