"""One conversation with a loaded pair: its turns, what can be changed between them, and its slash commands."""
