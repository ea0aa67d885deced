"""Choosing a policy by replaying every candidate on traces of one run."""
