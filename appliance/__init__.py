"""The run half of the project: inspects the machine, tunes the engine, stores the result and serves the model."""

__version__ = "0.1.0"
