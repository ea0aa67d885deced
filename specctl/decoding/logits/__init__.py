"""Sampling and verification over logits: `host` by numpy, `device` by torch, both for any number of texts."""
