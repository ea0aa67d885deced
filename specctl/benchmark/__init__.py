"""Measurement: suites, runs, the cost model and reports."""
