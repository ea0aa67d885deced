"""A pair that several processes have, each of which writes texts of one server."""
