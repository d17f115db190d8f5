"""All that knows llama.cpp: its flags, log, programs, kernels."""
