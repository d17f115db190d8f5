"""Weights by name: what a reference means, what is on the volume already, and fetching the rest.

Nothing here is imported by a start whose model is there; a test holds that.
"""
