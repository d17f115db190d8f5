"""What a lent GPU machine runs: README.md beside this file has the commands."""
