"""An appliance as a channel of one-api or new-api, made through their API: README.md."""
