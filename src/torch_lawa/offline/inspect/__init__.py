"""Inspect checkpoints and compare them."""
