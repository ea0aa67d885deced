"""What a forward pass of torch is made of: caches, masks, fixed buffers, compiled and captured passes."""
