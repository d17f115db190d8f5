"""What runs on the user's machine, beside the container and not in it."""
