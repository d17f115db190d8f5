"""Jobs and steps of CI, devcontainers, and pushed images."""
