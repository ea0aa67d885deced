"""Which tokens may follow a text, whatever the models say."""
