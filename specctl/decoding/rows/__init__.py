"""The rules of decoding on rows of numbers over the vocabulary, by numpy on the host and by torch on a device."""
