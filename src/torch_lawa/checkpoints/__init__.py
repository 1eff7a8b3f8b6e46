"""Checkpoints on disk or on a server: finding, reading and writing them."""
