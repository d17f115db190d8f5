"""Named API keys, their limits, and what was used with each."""
