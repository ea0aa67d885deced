"""What Python programs import: speculative decoding inside transformers, and the commands as functions."""
