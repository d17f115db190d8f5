"""The facts of a start before anything runs: image, machine, inputs, and why it is refused."""
