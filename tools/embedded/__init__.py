"""How the embedded models were made: corpus, training and model card."""
