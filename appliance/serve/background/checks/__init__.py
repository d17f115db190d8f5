"""Checks of a profile in idle time: abilities, context, speculative decoding, and a soak."""
