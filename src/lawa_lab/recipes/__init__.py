"""Training recipes: the demo and the experiments of the paper."""
