"""A checkpoint's files: where they are, what they say, and what of them cannot be used."""
