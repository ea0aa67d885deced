"""What runs in the processes of peers: only the standard library and the peer's own package may be imported here."""
