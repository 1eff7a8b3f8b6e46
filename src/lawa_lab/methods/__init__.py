"""Averaging methods to compare with the window of the latest snapshots."""
