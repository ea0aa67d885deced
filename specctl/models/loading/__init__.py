"""From a profile to models in memory, with runners around them."""
