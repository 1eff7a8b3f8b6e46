"""Averaging in the frameworks people already use: a file a framework, behind its extra."""
