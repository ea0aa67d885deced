"""The project's measurements: one command runs them all and writes docs/measurements.md."""
