"""Sampling and verification over logits: `host` with numpy, `device` with torch, both for any number of texts."""
