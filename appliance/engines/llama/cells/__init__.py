"""Cells of this engine, and the engine facts of the cells that were built: data (`engines/cells.py`)."""
