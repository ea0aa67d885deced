"""Checkpoints become runners: loading, placement, vocabulary match, KV caches."""
