"""What a profile's models will need and read, computed without their weights."""
