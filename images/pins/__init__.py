"""Locked inputs: Python packages, Debian packages, digests of base images."""
