"""The regression court of `appliance upgrade`: old and new image do the same work in pairs. The old one stays
unless the new one is as good."""
