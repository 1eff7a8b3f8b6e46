"""Models of the recipes, in plain PyTorch."""
