"""What all unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _without_docker() -> Iterator[None]:
    """The results are the same on a machine with Docker, whatever runs there, and on one without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        yield
