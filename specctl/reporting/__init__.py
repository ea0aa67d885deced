"""Tables, documents and the look of figures, whatever they report."""
