"""Where snapshots live: on the device, in host memory, or on disk."""
