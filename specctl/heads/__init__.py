"""Training a head that foretells acceptance (SpecDec++): its data, the training, and how good it became."""
