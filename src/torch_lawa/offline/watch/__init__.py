"""Follow a live run and average its latest checkpoints."""
