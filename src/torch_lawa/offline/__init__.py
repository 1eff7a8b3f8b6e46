"""Average, sweep, watch, inspect and compare checkpoints on disk or on a server."""
