"""Benchmarks: runs, bounds, the cost model, tables, figures and reports."""
