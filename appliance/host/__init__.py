"""Code that runs on the user's machine, outside the container."""
