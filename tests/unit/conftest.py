"""What all unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.alone import be_alone


@pytest.fixture(scope="package", autouse=True)
def _alone() -> Iterator[None]:
    """The results are the same on a machine with Docker, whatever runs there, and on one without."""
    with pytest.MonkeyPatch.context() as patch:
        be_alone(patch)
        yield
