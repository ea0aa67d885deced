"""Reference data for draft heads, made with the implementations that published them."""
