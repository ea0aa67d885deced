"""What reads models, so that rounds can be replayed without them: recording a text, and timing its parts."""
