"""Models that the recipes train, written out in plain PyTorch."""
