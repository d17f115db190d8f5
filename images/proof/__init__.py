"""Checks of a built image: its machine code, files, licenses, contents, and a second build that must be equal."""
