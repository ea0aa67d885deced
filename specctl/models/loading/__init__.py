"""From a name to a loaded model: find the checkpoint, fit it into memory, load it, explain failures."""
