"""A pair as an HTTP server."""
