"""Serve a model, from opening it to the last request. `run` tells the story: read it first."""
