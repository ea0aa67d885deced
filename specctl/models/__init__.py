"""Checkpoints become runners: `loading` finds and loads them, `running` makes passes fast."""
