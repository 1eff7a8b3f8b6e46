"""Paths and URLs, byte ranges of files, and writes that appear whole or not at all."""
