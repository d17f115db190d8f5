"""Which models are loaded on this machine, and who makes room for whom."""
