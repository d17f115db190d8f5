"""One served model as data, with the engine process that serves it."""
