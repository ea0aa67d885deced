"""The best setting of another engine's own stopping rule, found by replay and written as that engine reads it."""
