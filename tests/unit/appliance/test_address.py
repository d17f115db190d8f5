"""The line in which a gateway says where it listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.address import reachable, read_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0.0.0.0 11435\n", ("127.0.0.1", 11435)),
        (":: 80\n", ("127.0.0.1", 80)),
        ("10.0.0.7 1\n", ("10.0.0.7", 1)),
        ("", None),
        ("10.0.0.7", None),
        ("10.0.0.7 many", None),
        ("bücher 1", None),
    ],
)
def test_where_it_can_be_reached_from_its_container(tmp_path: Path, text: str, address: tuple[str, int] | None) -> None:
    path = tmp_path / "appliance.address"
    path.write_text(text, encoding="utf-8")
    assert read_address(path) == address


def test_nobody_listens_where_nobody_has_said_so(tmp_path: Path) -> None:
    assert read_address(tmp_path / "missing") is None
    assert reachable("127.0.0.1") == "127.0.0.1"
