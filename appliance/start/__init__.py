"""What is known before anything runs: image, machine, inputs, and why a start is refused."""
