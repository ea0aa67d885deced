"""The first ten minutes on a CUDA device: GPU tests, suspicions and speeds, each by itself, in one report."""
