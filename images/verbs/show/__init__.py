"""Verbs that only tell."""
