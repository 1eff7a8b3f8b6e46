"""Paths and URLs, byte ranges of files, and atomic writes."""
