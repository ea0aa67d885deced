"""The Python API: speculative decoding inside transformers, and the commands as functions."""
