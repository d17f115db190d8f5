"""The parts of the store: files and locks, marks, results of unfinished tunings."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import VolumeError
from appliance.profile.files import MAX_BYTES, ProfileFiles
from appliance.profile.marks import Marks, ProfileStatus
from appliance.profile.unfinished import UnfinishedTunings
from appliance.tune.checkpoint import Partial
from tests.builders import PARTIAL, key


@pytest.fixture
def files(tmp_path: Path) -> ProfileFiles:
    return ProfileFiles(tmp_path)


def test_a_file_is_put_whole_in_the_place_of_another(files: ProfileFiles) -> None:
    path = files.path("a")
    files.put(path, b"old", 5)
    files.put(path, b"new", 7)
    assert (files.read(path), files.modified_ns("a"), files.names()) == (b"new", 7, ["a.json"])
    files.put(path, bytes(MAX_BYTES + 9))
    assert len(files.read(path)) == MAX_BYTES + 1
    files.remove(path)
    files.remove(path)
    assert (files.names(), files.modified_ns("a")) == ([], 0)


def test_leftovers_are_those_of_the_id_and_no_profile(files: ProfileFiles) -> None:
    for name in (".a.json.0011.tmp", ".a.stale.22.tmp", ".ab.json.33.tmp", "a.json", "a.pin", "ab.json"):
        (files.folder / name).touch()
    assert (files.ids(), files.ids(".pin")) == (["a", "ab"], ["a"])
    files.drop_leftovers("a")
    assert files.names() == [".ab.json.33.tmp", "a.json", "a.pin", "ab.json"]


def test_the_next_time_is_later_than_every_other(files: ProfileFiles) -> None:
    late_ns = 4_070_908_800 * 10**9
    files.put(files.path("a"), b"", late_ns)
    assert files.next_ns() == late_ns + 1


def test_a_lock_is_held_by_one_and_let_go_at_the_end(files: ProfileFiles) -> None:
    with files.tuning("a") as first, ProfileFiles(files.folder).tuning("a") as second, files.tuning("b") as other:
        assert (first, second, other) == (True, False, True)
    with files.locked("a"), files.tuning("a") as again:
        assert again


def test_a_folder_that_cannot_be_listed_is_said(files: ProfileFiles) -> None:
    file = files.folder / "file"
    file.touch()
    with pytest.raises(VolumeError, match=r"profiles cannot be listed: .*file: Not a directory"):
        ProfileFiles(file).names()


def test_a_pin_is_there_or_not(files: ProfileFiles) -> None:
    marks = Marks(files)
    assert (marks.is_pinned("a"), marks.pinned_ids()) == (False, [])
    marks.pin("a")
    marks.pin("a")
    assert (marks.is_pinned("a"), marks.is_pinned("ab"), marks.pinned_ids()) == (True, False, ["a"])
    marks.unpin("a")
    marks.unpin("a")
    assert not marks.is_pinned("a")


def test_a_profile_is_stale_for_as_long_as_its_file_is_the_same(files: ProfileFiles) -> None:
    marks = Marks(files)
    files.put(files.path("a"), b"one")
    marks.mark_stale("a", "slow", b"one")
    assert marks.why_stale("a") == "slow"
    files.put(files.path("a"), b"two")
    assert marks.why_stale("a") is None
    marks.mark_stale("a", "slower", b"two")
    assert marks.why_stale("a") == "slower"
    files.remove(files.path("a"))
    assert marks.why_stale("a") is None
    marks.unmark_stale("a")
    assert files.names() == []


def test_what_is_to_be_said_of_a_profile() -> None:
    quiet = ProfileStatus(stale=None, provisional=None, is_pinned=False)
    assert (quiet.describe(), quiet.as_document()) == ((), {"stale": None, "provisional": None, "pinned": False})
    loud = ProfileStatus(stale="24 % slower", provisional="heat", is_pinned=True)
    assert loud.describe() == (
        "stale: 24 % slower",
        "provisional: heat when it was measured",
        "pinned: not measured again, and not replaced",
    )


def test_what_a_tuning_has_measured_is_kept_by_its_key(files: ProfileFiles) -> None:
    said: list[str] = []
    unfinished = UnfinishedTunings(files, said.append)
    unfinished.keep(key(), PARTIAL)
    assert (unfinished.kept(key()), unfinished.kept(key("b2"))) == (PARTIAL, Partial())
    unfinished.forget(key().id)
    assert (unfinished.kept(key()), said) == (Partial(), [])
    files.put(files.path(key().id, ".partial"), b"{")
    assert unfinished.kept(key()) == Partial()
    assert "is set aside as" in said[0]
    assert f"{key().id}.partial-corrupt" in files.names()
