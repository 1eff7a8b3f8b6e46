"""PyTorch pickles read as data: nothing in them is imported or executed, and no torch is needed."""
