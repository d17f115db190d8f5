"""Plans of vLLM: layout over GPUs, memory, context, flags, each with its reason. Pure."""
