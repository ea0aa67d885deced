"""Forward passes over one sequence: runners that extend and roll back, their caches and engines."""
