"""From settings to a slot: the model is found, checked against the machine, and fetched if it is not here."""
