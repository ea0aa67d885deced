"""Draft heads on disk: which kind a checkpoint is, its tensors under the network's names, and writing them."""
