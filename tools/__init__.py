"""Programs for people who work on specctl itself: not shipped in the wheel."""
