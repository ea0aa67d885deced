"""Texts on which a chain of a lookup and a model is measured, and a pair of models that copies."""
