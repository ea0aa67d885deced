"""Other implementations of speculative decoding that `bench --peer` measures next to specctl's own."""
