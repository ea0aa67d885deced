"""Exact replay: traces of one run, policies replayed on them, and the predicted time of the replayed rounds."""
