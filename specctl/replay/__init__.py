"""Exact replay: traces of one run, replay of policies on them, and the predicted time of the replayed rounds."""
