"""Checkpoint formats: how tensors are read from and written to files."""
