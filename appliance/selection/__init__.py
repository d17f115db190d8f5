"""Which model a start serves, and what could be served of a recipe or a repository."""
