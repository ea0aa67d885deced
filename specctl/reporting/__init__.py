"""Tables, documents and the style of figures, for all commands."""
