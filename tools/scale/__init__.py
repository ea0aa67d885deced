"""What a run on many cards would take: arithmetic and a simulation, from constants that docs/scale.md names."""
