"""Verbs that check images and machine code."""
