"""Stores for snapshots: on the device, in host memory, or on disk."""
