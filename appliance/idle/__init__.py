"""Measuring while nobody asks: when to, what with, and how another plan comes to serve without a request being lost."""
