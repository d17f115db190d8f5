"""Recipes of models, and their weights on this machine."""
