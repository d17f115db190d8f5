"""The work beside serving: idle tuning, drift, bandwidths, memory, other programs."""
