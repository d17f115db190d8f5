"""The image for a machine, and the reasons: GPUs, proofs, selection, explanation."""
