"""Engines: one folder each. No code outside an engine's folder knows its program, flags or log lines."""
