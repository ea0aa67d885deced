"""The part of replay that runs models: recording texts, and timing passes."""
