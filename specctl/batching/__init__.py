"""Several texts at once, by passes that they share."""
