"""From a cell to an image in this machine's engine."""
