"""Replicas of a pair, wherever they run: each answers one question at a time, and answers come back in order."""
