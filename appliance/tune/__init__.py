"""Step 3: measure the few promising plans on the real engine and keep what was seen.

Importing the package costs nothing: a start from a profile reads `search` and never needs the HTTP client of `measure`.
"""
