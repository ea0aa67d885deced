"""One model in shards, a process for each: a leader decides, followers repeat its passes."""
