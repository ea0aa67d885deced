"""A small draft model for a real target, distilled from the target's own answers."""
