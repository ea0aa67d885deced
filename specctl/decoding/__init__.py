"""The algorithm: sampling, verification, drafters and the loop."""
