"""What goes on beside serving: idle tuning, drift, bandwidths, memory, other programs."""
