"""Creates a channel for an appliance in one-api or new-api through their API; see README.md."""
