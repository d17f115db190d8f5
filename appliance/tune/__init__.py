"""Step 3 of a start: measure the most promising plans on the real engine and keep the results.

Importing the package costs nothing. A start from a profile reads figures only and never imports the engine's client.
"""
