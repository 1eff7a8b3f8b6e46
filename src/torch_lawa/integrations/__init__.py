"""Averaging in other frameworks: one module or package per framework, behind its extra."""
