"""PyTorch's pickles read as data: without PyTorch, and without importing or executing anything."""
