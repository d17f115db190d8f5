"""The run half: looks at the machine, tunes, remembers and serves."""

__version__ = "0.1.0"
