"""Figures of a benchmark."""
