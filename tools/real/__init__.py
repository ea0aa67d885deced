"""Programs that `tools.bench_real` starts: an engine each, driven by lines of JSON."""
