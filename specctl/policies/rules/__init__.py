"""The stopping policies, a module each."""
