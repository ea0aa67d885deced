"""This process among others: what Ctrl-C ends in it, and how it starts children."""
