"""Another package index for one build: which instructions see it, and where its address is not."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from images import __main__ as command
from images.build import build, index, mirror
from images.build.installed import INSTRUCTION
from images.build.mirror import Mirror
from images.errors import UsageError
from images.matrix import matrix
from images.matrix.matrix import Cell
from images.pins import lock
from images.verbs import flags

URL = "https://me:pw@wheels.example/simple"


@pytest.fixture
def job(job: build.Job, cell: Cell, project: Path, tmp_path: Path) -> build.Job:
    """Return a job that builds a copy of the cell's own Dockerfile with another package index."""
    for name in ("Dockerfile", "Dockerfile.dockerignore"):
        (tmp_path / cell.folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / cell.folder / name).write_text((project / cell.folder / name).read_text("utf-8"))
    return replace(job, archive=tmp_path / ".make/o.tar", index_url=URL)


@pytest.mark.parametrize("text", ["", "wheels.example", "file:///x", "https://", "https://a b", "ftp://x"])
def test_what_is_no_index_is_exit_2_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--index-url is no address of a package index$") as caught:
        flags.parse_index(text)
    assert (caught.value.exit_code, bool(caught.value.hint)) == (2, True)


def test_every_pip_of_every_cell_sees_it_and_nothing_else_does(project: Path) -> None:
    for cell in matrix.load(project).cells:
        text = (project / cell.folder / "Dockerfile").read_text("utf-8")
        changed = index.through_index(text)
        asking = [found for found in INSTRUCTION.finditer(text) if "pip install " in found.group()]
        assert changed.count(f"id={index.SECRET}") == len(asking) > 0
        assert changed.replace(index.MOUNT, "") == text


def test_the_address_is_in_one_file_that_only_its_owner_reads(job: build.Job, tmp_path: Path) -> None:
    planned = index.through(tmp_path, job)
    folder = mirror.folder_of(job)
    assert planned.secrets == (f"id=pip-index,src={folder / 'pip.conf'}",)
    assert sorted(path.name for path in folder.iterdir()) == ["Dockerfile", "Dockerfile.dockerignore", "pip.conf"]
    assert (folder / "pip.conf").read_text() == f"[global]\nindex-url = {URL}\n"
    assert stat.S_IMODE((folder / "pip.conf").stat().st_mode) == 0o600
    assert "wheels.example" not in (folder / "Dockerfile").read_text() + " ".join(build.buildx_argv(planned))
    with mirror.workplace(tmp_path, planned):
        pass
    assert not folder.exists()


def test_a_mirror_of_debian_goes_with_it(job: build.Job, tmp_path: Path) -> None:
    sources = "@source a.list\ndeb http://archive.example/debian bookworm main\n"
    mirrored = mirror.write(tmp_path, job, Mirror(root="http://h"), sources)
    both = index.through(tmp_path, mirrored)
    text = (tmp_path / both.dockerfile).read_text()
    assert both.dockerfile == mirrored.dockerfile
    assert both.secrets[:-1] == mirrored.secrets
    assert ("id=debian-apt.conf" in text, "id=pip-index" in text) == (True, True)


def test_without_another_index_nothing_changes(job: build.Job, tmp_path: Path) -> None:
    plain = replace(job, index_url=None)
    assert index.plan(plain) is plain
    assert index.through(tmp_path, plain) is plain


def test_an_index_without_tls_is_trusted_by_its_name() -> None:
    assert index.configuration("http://u:p@h:81/simple").splitlines()[-1] == "trusted-host = h:81"


def test_uv_is_told_by_its_environment() -> None:
    """It writes an index that it was given as a flag into the lock."""
    argv = lock.uv_argv("dev", "wheels", Path("x"), ca_bundle=None, upgrade=False, index_url=URL)
    assert argv[:2] == ("env", f"UV_DEFAULT_INDEX={URL}")
    assert not [word for word in argv if word.startswith("--index")]


def test_an_index_without_a_build_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["verify", "--only", "llama-cpu", "--index-url", URL]) == 2
    said = capsys.readouterr().err
    assert "--index-url belongs to --reproduce" in said
    assert "pw" not in said
