"""Exact replay: traces of one run, every policy played on them, and what its rounds would cost."""
