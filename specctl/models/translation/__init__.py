"""Drafts whose tokenizer is not their target's."""
