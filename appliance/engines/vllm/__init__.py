"""vLLM as an engine: planning, process, startup, API and facts of its images."""
