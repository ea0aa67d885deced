"""Parts of a torch forward pass: caches, masks, fixed buffers, compiled and captured passes."""
