"""Trained predictors of acceptance: the networks, their files, and which draft token they judge."""
