"""Data of the recipes: public layouts in, tensors out."""
