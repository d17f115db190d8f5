"""A Debian mirror for one build: where it is asked, what it does to the base's sources, and what it leaves alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from images.build import build, mirror
from images.build.mirror import Mirror
from images.errors import BuildError, UsageError
from images.matrix import matrix
from images.matrix.matrix import Cell
from images.pins import debian

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
    ("given", "name", "source", "expected"),
    [
        ("http://h:1/x", "list", OLD, "deb [signed-by=/k.gpg] http://h:1/x/debian bookworm main contrib non-free\n"),
        ("http://h@20260718T020000Z", "sources", NEW, "URIs: http://h/debian-security/20260718T020000Z\n"),
        ("http://h", "sources", NEW, "Components: main contrib non-free\n"),
        ("http://h", "list", "deb https://a.b/c/debian/ b main\n", "deb http://h/debian b main contrib non-free\n"),
    ],
)
def test_a_source_is_rewritten(given: str, name: str, source: str, expected: str) -> None:
    files = mirror.rewritten(mirror.parse_mirror(given), f"{debian.FILE_MARK}debian.{name}\n{source}\n")
    assert files.keys() == {"apt.conf", f"base.{name}"}
    assert expected in files[f"base.{name}"]


def test_sources_of_two_forms_are_kept_apart() -> None:
    sources = f"{debian.FILE_MARK}a.list\n{OLD}{debian.FILE_MARK}b.sources\n{NEW}{debian.FILE_MARK}c.list\n{OLD}"
    files = mirror.rewritten(Mirror(root="http://h"), sources)
    assert files["base.list"].count("deb ") == 2
    assert files["base.sources"].count("URIs: ") == 1


@pytest.mark.parametrize("line", ["deb http://a/debian12 b main", "deb http://a/ubuntu b main", "URIs: cdrom://x"])
def test_a_source_that_would_be_asked_in_silence_is_exit_60(line: str) -> None:
    with pytest.raises(BuildError, match=f"in neither of a mirror's archives.*: {line}") as caught:
        mirror.rewritten(Mirror(root="http://h"), f"{debian.FILE_MARK}a.list\n{OLD}{line}\n")
    assert (caught.value.exit_code, bool(caught.value.hint)) == (60, True)


def test_a_base_without_sources_is_exit_60() -> None:
    with pytest.raises(BuildError, match="the base names no source of Debian packages"):
        mirror.rewritten(Mirror(root="http://h"), "")


def test_only_a_snapshot_may_be_out_of_date() -> None:
    texts = [
        mirror.rewritten(Mirror(root="http://h", timestamp=each), f"{debian.FILE_MARK}a.list\n{OLD}")["apt.conf"]
        for each in (None, "20260718T020000Z")
    ]
    assert ["Check-Valid-Until" in text for text in texts] == [False, True]


def test_every_instruction_with_apt_gets_the_mounts_and_no_other_one(project: Path) -> None:
    for cell in matrix.load(project).cells:
        text = (project / cell.folder / "Dockerfile").read_text("utf-8")
        made = mirror.through_mirror(text)
        assert made.count(f"target={mirror.CONFIGURED}") == sum("apt-get update" in line for line in text.splitlines())
        assert made.replace(mirror.MOUNTS, "") == text
        assert debian.asked(made) == debian.asked(text)


def test_no_address_and_no_date_reaches_what_a_layer_is_known_by(cell: Cell, tmp_path: Path) -> None:
    """Secrets are no part of the builder's cache key, and the Dockerfile is the same for all archives."""
    folder = tmp_path / cell.folder
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM a AS b\nRUN apt-get update\n")
    job = build.Job(
        cell=cell,
        base=build.BaseChoice(identity="sha256:1"),
        origin=build.Origin(epoch_s=0, revision=None),
        build_id="b" * 32,
        version="0",
        tag="t",
        archive=tmp_path / ".make" / "o.tar",
    )
    texts = []
    for given in ("http://h", "http://else@20260718T020000Z"):
        with mirror.workplace(tmp_path, job):
            made = mirror.write(tmp_path, job, mirror.parse_mirror(given), f"{debian.FILE_MARK}a.list\n{OLD}")
            texts.append((tmp_path / made.dockerfile).read_text())
            assert sorted(each.partition(",")[0] for each in made.secrets) == [
                "id=debian-apt.conf",
                "id=debian-base.list",
            ]
            assert made.contexts == ()
        assert not mirror.folder_of(job).exists()
    assert texts[0] == texts[1]


def test_sources_are_put_where_apt_looks_in_a_container_that_is_thrown_away(tmp_path: Path) -> None:
    files = mirror.rewritten(Mirror(root="http://h"), f"{debian.FILE_MARK}a.list\n{OLD}")
    script = mirror.prologue(files).replace("/run/", f"{tmp_path}/").replace("/etc/apt/apt.conf.d/", f"{tmp_path}/")
    subprocess.run(["sh", "-euc", script], check=True)
    assert "http://h/debian bookworm" in (tmp_path / "debian-mirror/base.list").read_text()
    assert "Dir::Etc::SourceParts" in (tmp_path / "99debian-mirror").read_text()


def test_a_mirror_is_written_as_it_is_taken() -> None:
    for text in ("http://h/a@20260718T020000Z", "http://h"):
        assert str(mirror.parse_mirror(text)) == text
