"""Forward passes over sequences: runners that extend and roll back, their caches and engines."""
