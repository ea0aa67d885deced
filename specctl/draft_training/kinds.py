"""The kinds of draft heads that can be trained: what a new one is, what it learns from, how it is written."""
