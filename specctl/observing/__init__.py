"""Running settings on prompts, and what is written down about it."""
