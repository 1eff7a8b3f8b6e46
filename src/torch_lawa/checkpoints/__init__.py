"""Bytes to named tensors and back."""
