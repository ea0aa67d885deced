"""Tables, documents and the look of figures; knows nothing of what they report."""
