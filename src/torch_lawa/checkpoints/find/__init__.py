"""Which checkpoints an input names, and in which order."""
