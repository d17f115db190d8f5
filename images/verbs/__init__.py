"""One file for each verb of `python3 -m images`: `add_arguments(parser)` and `run(options)`."""
