"""Programs that `tools.bench_real` starts: an engine each, asked by lines of JSON."""
