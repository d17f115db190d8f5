"""Verbs that both the host and a container have: what they ask of a running appliance, and what they print."""
