"""Weights by name: what a reference means, which of its files are on the volume, and fetching the rest.

A start whose model is on the volume imports nothing of this package; a test holds that.
"""
