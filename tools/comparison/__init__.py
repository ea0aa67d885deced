"""The comparison of policies that `tools.compare_policies` prints."""
