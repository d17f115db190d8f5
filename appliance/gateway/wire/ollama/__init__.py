"""Ollama's API in terms of OpenAI's: requests in one direction, answers and streams in the other. Pure."""
