"""What a profile's models will need and read, told without their weights."""
