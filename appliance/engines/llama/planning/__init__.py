"""What llama.cpp can do with one model on one machine: settings and facts in, plans out. Pure."""
