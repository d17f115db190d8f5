"""Plans of llama.cpp for one model on one machine, computed from settings and facts. Pure."""
