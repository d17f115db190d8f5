"""Saved images and OCI archives, read layer by layer."""
