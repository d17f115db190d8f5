"""Verbs that make images and take them away."""
