"""Opening a slot from settings: the model is found, checked against the machine, and fetched if it is not here."""
