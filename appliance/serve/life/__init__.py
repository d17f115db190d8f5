"""From a slot to an engine that answers, its restarts and its end."""
