"""Which image suits a machine, and why: GPUs, proofs, selection, explanation."""
