"""What commands do with what they read: load, run, show, write."""
