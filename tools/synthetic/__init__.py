"""Models of real shapes with random weights, which `tools.synthetic_pair` writes."""
