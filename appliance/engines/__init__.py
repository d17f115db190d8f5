"""One folder an engine; nothing else knows its program, flags or log."""
