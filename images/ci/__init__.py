"""What runs in CI, and what is published: jobs, steps, devcontainers, pushed images."""
