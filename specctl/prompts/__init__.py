"""What is asked: benchmark suites, their formats, and where they come from."""
