"""What runs on a machine with a GPU: README.md beside this file has the commands."""
