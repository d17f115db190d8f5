"""A Debian mirror for one build: where it is asked, what it does to the base's sources, and what it leaves alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from images import debian, matrix, mirror
from images.errors import UsageError
from images.mirror import Mirror

OLD = "deb [signed-by=/k.gpg] http://archive.example/debian bookworm main\n"
NEW = """Types: deb
URIs: http://archive.example/debian-security/
Suites: bookworm-security
Components: main
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://10.0.0.1:80", Mirror(root="http://10.0.0.1:80")),
        ("https://host/archive/", Mirror(root="https://host/archive")),
        ("http://h/a@20260718T020000Z", Mirror(root="http://h/a", timestamp="20260718T020000Z")),
    ],
)
def test_a_mirror_is_a_root_and_perhaps_a_timestamp(text: str, expected: Mirror) -> None:
    assert mirror.parse_mirror(text) == expected


@pytest.mark.parametrize("text", ["", "host/debian", "http://", "http://h@2026", "http://h x", "http://h/'", "ftp://h"])
def test_what_is_no_mirror_is_exit_2(text: str) -> None:
    with pytest.raises(UsageError, match="is no address of a mirror") as caught:
        mirror.parse_mirror(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.parametrize(
    ("given", "source", "expected"),
    [
        ("http://h:1/x", OLD, "deb [signed-by=/k.gpg] http://h:1/x/debian bookworm main contrib non-free\n"),
        ("http://h@20260718T020000Z", NEW, "URIs: http://h/debian-security/20260718T020000Z\n"),
        ("http://h", NEW, "Components: main contrib non-free\n"),
        ("http://h", "deb http://a/debian12 b main\n", "deb http://a/debian12 b main contrib non-free\n"),
    ],
)
def test_a_source_is_rewritten(given: str, source: str, expected: str, tmp_path: Path) -> None:
    script = tmp_path / "rewrite.sed"
    script.write_text(mirror.address(mirror.parse_mirror(given))["rewrite.sed"])
    done = subprocess.run(["sed", "-E", "-f", script], input=source, capture_output=True, text=True, check=True)
    assert expected in done.stdout


def test_only_a_snapshot_may_be_out_of_date() -> None:
    assert "Check-Valid-Until" not in mirror.address(Mirror(root="http://h"))["apt.conf"]
    assert "Check-Valid-Until" in mirror.address(Mirror(root="http://h", timestamp="20260718T020000Z"))["apt.conf"]


def test_every_instruction_with_apt_gets_the_mounts_and_no_other_one(project: Path) -> None:
    for cell in matrix.load(project).cells:
        text = (project / cell.folder / "Dockerfile").read_text("utf-8")
        made = mirror.through_mirror(text)
        assert made.count("target=/run/debian-mirror") == sum("apt-get update" in line for line in text.splitlines())
        assert made.replace(mirror.MOUNTS, "").replace(sources_stage(made), "") == text
        assert debian.asked(made) == debian.asked(text)


def sources_stage(text: str) -> str:
    start = text.index("FROM ")
    return text[start : text.index("FROM ", start + 1)]
