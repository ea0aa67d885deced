"""Intervals, rank statistics and logistic curves over plain arrays."""
