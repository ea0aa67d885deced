"""Chooses a setting by replaying every candidate on traces of one run."""
