"""Other implementations of speculative decoding that `bench --peer` measures beside specctl's own."""
