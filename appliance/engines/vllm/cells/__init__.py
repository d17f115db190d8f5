"""The cells of this engine, and what the engine says of itself in those that were built: data (`engines/cells.py`)."""
