"""Complete models in a hub cache as the hub's own client writes it: found, skipped, or reported as unreadable."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from appliance.reference import parse_reference
from appliance.weights.cache.download_set import Wanted, WantedFile, folder_of_repo
from appliance.weights.cache.hub_layout import RepoFolder, find, keep_ref, link_snapshot, make_folders, read_ref
from appliance.weights.download.locks import if_free, locked
from appliance.weights.stores.stores import lookup

REPO = "org/Tiny-GGUF"
COMMIT = "1" * 40


def file_of(path: str, data: bytes) -> WantedFile:
    return WantedFile(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), url=f"https://hub/{path}")


def wanted_of(files: dict[str, bytes], revision: str = COMMIT) -> Wanted:
    return Wanted(
        repo=REPO,
        revision=revision,
        folder=folder_of_repo(REPO),
        files=tuple(file_of(path, data) for path, data in files.items()),
        name=REPO,
        ref="main",
    )


def put(root: Path, files: dict[str, bytes], revision: str = COMMIT) -> Wanted:
    wanted = wanted_of(files, revision)
    folder = RepoFolder(root=root, name=wanted.folder)
    folder.make()
    blobs = [folder.blob(file.key) for file in wanted.files]
    for blob, data in zip(blobs, files.values(), strict=True):
        blob.write_bytes(data)
    link_snapshot(wanted, folder, blobs)
    return wanted


def test_what_was_linked_is_found(tmp_path: Path) -> None:
    wanted = put(tmp_path, {"sub/a-Q4_0.gguf": b"a", "mmproj-F16.gguf": b"m"})
    paths = find(wanted, [tmp_path / "other", tmp_path])
    assert paths is not None
    assert [path.read_bytes() for path in paths] == [b"a", b"m"]
    assert paths[0].readlink() == Path(f"../../../blobs/{wanted.files[0].sha256}")


def test_the_same_bytes_in_another_commit_are_found(tmp_path: Path) -> None:
    put(tmp_path, {"a.gguf": b"a"})
    paths = find(wanted_of({"a.gguf": b"a"}, "2" * 40), [tmp_path])
    assert paths
    assert paths[0].parent.name == COMMIT


@pytest.mark.parametrize("other", [b"b", b"longer"])
def test_other_bytes_are_not(tmp_path: Path, other: bytes) -> None:
    put(tmp_path, {"a.gguf": b"a"})
    assert find(wanted_of({"a.gguf": other}), [tmp_path]) is None
    assert find(wanted_of({"a.gguf": other}, "2" * 40), [tmp_path]) is None


def test_a_set_that_lacks_a_part_is_not(tmp_path: Path) -> None:
    put(tmp_path, {"a-00001-of-00002.gguf": b"1"})
    assert find(wanted_of({"a-00001-of-00002.gguf": b"1", "a-00002-of-00002.gguf": b"2"}), [tmp_path]) is None
    assert lookup(parse_reference(REPO), [tmp_path], "gguf") is None


def test_a_file_without_a_link_is_taken_at_its_own_commit_alone(tmp_path: Path) -> None:
    """If links cannot be made, the hub's client puts the file itself into the snapshot."""
    snapshot = RepoFolder(root=tmp_path, name=folder_of_repo(REPO)).snapshot(COMMIT)
    snapshot.mkdir(parents=True)
    (snapshot / "a.gguf").write_bytes(b"a")
    assert find(wanted_of({"a.gguf": b"a"}), [tmp_path])
    assert find(wanted_of({"a.gguf": b"a"}, "2" * 40), [tmp_path]) is None


def test_a_link_that_leads_nowhere_is_passed_over(tmp_path: Path) -> None:
    wanted = put(tmp_path, {"a.gguf": b"a"})
    RepoFolder(root=tmp_path, name=wanted.folder).blob(wanted.files[0].key).unlink()
    assert find(wanted, [tmp_path]) is None
    assert lookup(parse_reference(REPO), [tmp_path], "gguf") is None


def test_without_a_network_the_branch_tells_first_and_age_after_it(tmp_path: Path) -> None:
    put(tmp_path, {"a-Q4_K_M.gguf": b"old", "a-Q8_0.gguf": b"8"}, "2" * 40)
    put(tmp_path, {"a-Q4_K_M.gguf": b"new"})
    for text, data, commit in (
        (REPO, b"new", COMMIT),
        (f"{REPO}:Q8_0", b"8", "2" * 40),
        (f"{REPO}@{'2' * 40}", b"old", "2" * 40),
        (f"{REPO}/a-Q8_0.gguf", b"8", "2" * 40),
        (f"{REPO}@main", b"new", COMMIT),
    ):
        found = lookup(parse_reference(text), [tmp_path], "gguf")
        assert found, text
        assert found[0].read_bytes() == data
        assert found[0].parent.name == commit
    for text in (f"{REPO}:Q2_K", f"{REPO}@{'3' * 40}", "org/other", "https://host/a.gguf"):
        assert lookup(parse_reference(text), [tmp_path], "gguf") is None


def test_a_folder_is_found_where_a_folder_is_served(tmp_path: Path) -> None:
    put(tmp_path, {"config.json": b"{}", "model.safetensors": b"s", "a-Q8_0.gguf": b"8"})
    found = lookup(parse_reference(REPO), [tmp_path], "safetensors")
    assert found
    assert {"config.json", "model.safetensors"} <= {path.name for path in found}
    assert {path.parent for path in found} == {RepoFolder(root=tmp_path, name=folder_of_repo(REPO)).snapshot(COMMIT)}


def test_a_ref_that_is_a_pipe_is_none(tmp_path: Path) -> None:
    wanted = put(tmp_path, {"a.gguf": b"a"})
    folder = RepoFolder(root=tmp_path, name=wanted.folder)
    folder.ref("main").unlink()
    os.mkfifo(folder.ref("main"))
    assert read_ref(folder, "main") is None
    found = lookup(parse_reference(REPO), [tmp_path], "gguf")
    assert found
    assert found[0].parent.name == COMMIT
    keep_ref(wanted, folder)
    assert read_ref(folder, "main") == COMMIT


@pytest.mark.parametrize("text", ["../../../etc", "a/b", "", "x\ny"])
def test_a_hostile_ref_is_none(tmp_path: Path, text: str) -> None:
    wanted = put(tmp_path, {"a.gguf": b"a"})
    RepoFolder(root=tmp_path, name=wanted.folder).ref("main").write_text(text)
    found = lookup(parse_reference(REPO), [tmp_path], "gguf")
    assert found
    assert found[0].parent.name == COMMIT


def test_folders_hand_their_group_on_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        make_folders(tmp_path / "a/b/c", below=tmp_path)
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o7777) for path in (tmp_path / "a", tmp_path / "a/b/c")] == ["0o2775"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_a_lock_of_another_user_can_be_waited_for(tmp_path: Path) -> None:
    """Older clients made their locks with the umask: mode 0644."""
    path = tmp_path / "key.lock"
    path.touch(0o644)
    parents = [each for each in tmp_path.parents if "pytest-of-" in str(each)]
    with another_user(*parents, tmp_path):
        async with locked(path, lambda: None):
            with if_free(path) as is_free:
                assert not is_free
        with if_free(path) as is_free:
            assert is_free


@contextmanager
def another_user(*folders: Path) -> Iterator[None]:
    for folder in folders:
        folder.chmod(0o755)
    os.seteuid(1234)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    wanted = put(tmp_path, {"a.gguf": b"a"})
    folder = RepoFolder(root=tmp_path, name=wanted.folder)
    path = folder.snapshot(COMMIT) / "a.gguf"
    named: list[tuple[Path, str | None]] = []
    parents = [each for each in tmp_path.parents if "pytest-of-" in str(each)]
    for closed in (path.resolve(), folder.blobs):
        closed.chmod(0o600)
        with another_user(*parents, tmp_path):
            assert find(wanted, [tmp_path], lambda path, error: named.append((path, error.strerror))) is None
    folder.blobs.chmod(0o755)
    (folder.path / "snapshots").chmod(0o600)
    with another_user(*parents, tmp_path):
        assert find(wanted, [tmp_path], lambda path, error: named.append((path, error.strerror))) is None
        assert lookup(parse_reference(REPO), [tmp_path], "gguf") is None
    assert named[:2] == [(path, "Permission denied")] * 2
    assert (folder.path, "Permission denied") in named
