"""Verbs that write files of the clone."""
