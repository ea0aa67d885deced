"""Whether a model can run here: which devices, which dtype, how much memory, and what it would need."""
