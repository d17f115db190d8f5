"""Planner for vLLM: layout over GPUs, memory, context length and flags, each with its reason. Pure."""
