"""The engine llama.cpp: its flags, log lines, programs and kernels."""
