"""What is known of vLLM so far: what an image of it takes."""
