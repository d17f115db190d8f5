"""Weights on disk: the volume's, and those in mounted folders of other tools."""
