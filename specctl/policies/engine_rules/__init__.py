"""Rules of other engines that are replayed for `calibrate --export` and not offered as policies."""
