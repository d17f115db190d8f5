"""The build itself: a cell becomes an image in this machine's engine."""
