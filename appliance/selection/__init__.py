"""Selection of the model: what was asked for, and what could be served of a recipe or a repository."""
