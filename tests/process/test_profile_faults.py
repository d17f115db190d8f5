"""The store with a disk that fails at every operation in turn, a process that dies at each, a kill -9, a full disk."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import VolumeError
from appliance.plan import CardPeak, MemoryPeak
from appliance.profile import Profile, ProfileStore, dump_profile
from appliance.profile.partial import dump_partial
from appliance.system.disk import Disk
from appliance.tune.checkpoint import Partial
from tests.builders import BUSY, PARTIAL, key, measured, profile
from tests.golden.vllm_plans import hardware
from tests.mounts import tmpfs
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, best

ROOT = Path(__file__).parents[2]
OLD = profile(speed="old")
NEW = profile(speed="new " + "x" * 5000)
OTHER = profile(key("b2"), speed="another build")
DATA = dump_profile(OLD).encode()
GPUS = hardware(ADA).gpus.gpus
ON_CARD = replace(best(ADA), choices=())
CARDS = (CardPeak(device=ON_CARD.placement.shares[0].gpu.id, kv_mib=9000.5, ready_mib=20_000, peak_mib=20_600),)
PEAK, HIGHER = MemoryPeak(plan=ON_CARD, cards=CARDS), MemoryPeak(plan=ON_CARD, cards=CARDS, is_whole=True)
BEGUN = Partial(measurements=OLD.measurements[:1])
FURTHER = replace(PARTIAL, measurements=(*OLD.measurements, measured(OLD.plan, conditions=BUSY)))
DUMPS = frozenset(dump_profile(one) for one in (OLD, NEW, OTHER))
BEGINNINGS = frozenset(dump_partial(OLD.key, seen) for seen in (BEGUN, FURTHER))
OPERATIONS = (
    *("names", "read", "modified_ns", "create", "open_lock", "open_folder", "lock"),
    *("write", "set_modified", "sync", "close", "rename", "remove"),
)
DELAYED = {"close"}  # it is done all the same, as the kernel does, so that no test leaks a handle


class Died(BaseException):
    """The process is gone: nothing that it would have done comes after it."""


class Flawed(Disk):
    """Fails at the operation of one number, and after a death at all others; the rest is the real disk."""

    def __init__(self, fail_at: int = -1, error: BaseException | None = None, *, torn: bool = False) -> None:
        self.trace: list[str] = []
        self._fail_at = fail_at
        self._error = error or OSError(errno.EIO, os.strerror(errno.EIO))
        self._torn = torn
        self.handles: list[int] = []

    def step(self, name: str, real: Callable[..., Any], *words: Any, **options: Any) -> Any:
        self.trace.append(name)
        is_dead = isinstance(self._error, Died) and self._fail_at >= 0 and len(self.trace) - 1 > self._fail_at
        if len(self.trace) - 1 != self._fail_at and not is_dead:
            return real(*words, **options)
        if name in DELAYED:
            real(*words, **options)
        if name == "write" and self._torn:
            real(words[0], words[1][: len(words[1]) // 2])
        raise self._error


def flawed(name: str) -> Callable[..., Any]:
    def method(self: Flawed, *words: Any, **options: Any) -> Any:
        return self.step(name, getattr(super(Flawed, self), name), *words, **options)

    return method


for operation in OPERATIONS:
    setattr(Flawed, operation, flawed(operation))


def test_the_flawed_disk_covers_the_whole_disk() -> None:
    assert set(OPERATIONS) == {name for name in vars(Disk) if not name.startswith("_")}


WORDS = "decoded 12.1 tok/s, 16.0 measured"
BEFORE = "before"
Action = Callable[[ProfileStore], object]
ACTIONS: dict[str, tuple[Action, tuple[Profile | None, ...]]] = {
    # What is done, and what may be there for the key afterwards.
    "save": (lambda store: store.save(NEW), (OLD, NEW)),
    "save what was disturbed": (lambda store: store.save(replace(NEW, disturbance="heat")), (OLD,)),
    "keep": (lambda store: store.keep(OLD.key, FURTHER), (OLD,)),
    "keep a peak": (lambda store: store.keep_peak(OLD.key, HIGHER, GPUS), (OLD,)),
    "doubt a peak": (lambda store: store.doubt_peak(OLD.key, ON_CARD), (OLD,)),
    "save another": (lambda store: store.save(OTHER), (OLD,)),
    "pin": (lambda store: store.pin(OLD.key.id), (OLD,)),
    "unpin": (lambda store: store.unpin(OLD.key.id), (OLD,)),
    "forget": (lambda store: store.forget(OLD.key.id), (OLD, None)),
    "mark stale": (lambda store: store.mark_stale(OLD, WORDS), (OLD,)),
    "mark stale again": (lambda store: store.mark_stale(OLD, WORDS), (OLD,)),
    "save over stale": (lambda store: store.save(NEW), (OLD, NEW)),
    "forget stale": (lambda store: store.forget(OLD.key.id), (OLD, None)),
    "ask for stale": (lambda store: store.why_stale(OLD), (OLD,)),
    "load": (lambda store: store.load(OLD.key), (OLD,)),
    "list": (lambda store: (store.all(), store.foreign()), (OLD,)),
}


def prepared(folder: Path, action: str) -> list[str]:
    """Make a store for the action. Returns an empty list, for what the store tells later."""
    folder.mkdir()
    store = ProfileStore(folder, pytest.fail)
    assert store.save(OLD)
    if action == "unpin":
        store.pin(OLD.key.id)
    if action in ("mark stale again", "save over stale", "forget stale", "ask for stale"):
        assert store.mark_stale(OLD, BEFORE)
    store.keep(OLD.key, BEGUN)
    if action.endswith("a peak"):
        store.keep_peak(OLD.key, HIGHER if action == "doubt a peak" else PEAK, GPUS)
    for kind in ("json", "partial", "stale"):
        (folder / f".{OLD.key.id}.{kind}.0011.tmp").write_bytes(b"{half")  # of a writer that was killed
    return []


def traced(folder: Path, action: str) -> list[str]:
    prepared(folder, action)
    disk = Flawed()
    ACTIONS[action][0](ProfileStore(folder, pytest.fail, disk))
    return disk.trace


def assert_whole(folder: Path, allowed: tuple[Profile | None, ...]) -> None:
    """Check the folder with a new store and a sound disk: nothing is set aside, and what it reads is one of
    `allowed`."""
    store = ProfileStore(folder, pytest.fail)
    found = store.load(OLD.key)
    assert found in allowed
    assert all(one in (OLD, NEW, OTHER) for one in store.all())
    assert store.foreign() == ()
    for path in folder.glob("[!.]*.json"):
        assert path.read_text() in DUMPS
    if found is not None:
        assert store.why_stale(found) in ((None, BEFORE, WORDS) if found == OLD else (None,))
    for path in folder.glob("[!.]*.stale"):
        assert json.loads(path.read_text())["words"] in (BEFORE, WORDS)
    for path in folder.glob("[!.]*.partial"):
        assert path.read_text() in BEGINNINGS
    assert store.kept(OLD.key) in (BEGUN, FURTHER, Partial())
    assert store.peaks(OLD.key, GPUS) in ((), (PEAK,), (HIGHER,))
    # And it works: a pin that is there is one that can be lifted.
    if found is not None:
        store.unpin(found.key.id)
    store.keep(OLD.key, FURTHER)
    assert store.kept(OLD.key) == FURTHER
    assert store.save(NEW)
    assert store.load(NEW.key) == NEW
    assert store.why_stale(NEW) is None
    assert store.kept(OLD.key) == Partial()
    assert not list(folder.glob(f".{OLD.key.id}*.tmp"))
    assert not list(folder.glob(f"{OLD.key.id}.stale"))


FAULTS: dict[str, Callable[[], tuple[BaseException, bool]]] = {
    "EIO": lambda: (OSError(errno.EIO, os.strerror(errno.EIO)), False),
    "ENOSPC": lambda: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False),
    "torn": lambda: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
    "dies": lambda: (Died(), False),
    "dies torn": lambda: (Died(), True),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_fault_at_any_operation_leaves_a_whole_store(tmp_path: Path, action: str, fault: str) -> None:
    do, allowed = ACTIONS[action]
    count = len(traced(tmp_path / "traced", action))
    assert count >= 2
    failed = 0
    prepared(tmp_path / "prepared", action)
    for number in range(count):
        folder = shutil.copytree(tmp_path / "prepared", tmp_path / f"at{number}")
        error, torn = FAULTS[fault]()
        disk = Flawed(number, error, torn=torn)
        try:
            do(ProfileStore(folder, pytest.fail, disk))
        except VolumeError:
            failed += 1
        except Died:
            failed += 1
        assert_whole(folder, allowed)
    assert failed > 0


@pytest.mark.parametrize("data", [b"", DATA[:-100], DATA.replace(b'"old"', b'"odd"')], ids=["empty", "cut", "changed"])
def test_the_check_for_a_whole_store_sees_one_that_is_not(tmp_path: Path, data: bytes) -> None:
    prepared(tmp_path / "a", "save")
    (tmp_path / f"a/{OLD.key.id}.json").write_bytes(data)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        assert_whole(tmp_path / "a", (OLD,))


def test_the_old_profile_stays_until_the_new_one_is_on_the_disk(tmp_path: Path) -> None:
    """File before name, name before folder: in another order a power cut could leave a name with nothing in it."""
    trace = [name for name in traced(tmp_path / "a", "save") if name not in ("names", "read", "modified_ns")]
    assert trace == [
        *("open_lock", "lock", "remove", "remove", "remove"),
        *("create", "write", "set_modified", "sync", "close", "rename"),
        *("open_folder", "sync", "close"),
        "remove",  # the stale mark of the old one, if there is one
        "remove",  # the checkpoint goes last: a tuning can resume from it until then
        "close",
    ]


@pytest.mark.parametrize("action", ["pin", "unpin", "forget"])
def test_what_changes_names_ends_with_a_sync_of_the_folder(tmp_path: Path, action: str) -> None:
    assert traced(tmp_path / "a", action)[-4:] == ["open_folder", "sync", "close", "close"]


def test_what_was_kept_and_cannot_be_read_is_measured_again(tmp_path: Path) -> None:
    prepared(tmp_path / "a", "keep")
    assert ProfileStore(tmp_path / "a", pytest.fail).kept(OLD.key) == BEGUN
    said: list[str] = []
    assert ProfileStore(tmp_path / "a", said.append, Flawed(0)).kept(OLD.key) == Partial()
    assert len(said) == 1
    assert said[0].endswith(f"{OLD.key.id}.partial: Input/output error")
    assert ProfileStore(tmp_path / "a", pytest.fail).kept(OLD.key) == BEGUN


def test_what_was_kept_damaged_and_cannot_be_set_aside_is_no_reason_to_fail(tmp_path: Path) -> None:
    prepared(tmp_path / "a", "keep")
    path = tmp_path / f"a/{OLD.key.id}.partial"
    path.write_text("{")
    for number, name in enumerate(("read", "rename")):
        said: list[str] = []
        disk = Flawed(number)
        assert ProfileStore(tmp_path / "a", said.append, disk).kept(OLD.key) == Partial()
        assert disk.trace[-1] == name
        assert len(said) == 1
        assert path.read_text() == "{"
    ProfileStore(tmp_path / "a", pytest.fail).keep(OLD.key, FURTHER)
    assert ProfileStore(tmp_path / "a", pytest.fail).kept(OLD.key) == FURTHER


def test_until_the_rename_what_was_kept_before_is_there(tmp_path: Path) -> None:
    trace = traced(tmp_path / "traced", "keep")
    assert trace[-5:] == ["rename", "open_folder", "sync", "close", "close"]
    for number in range(trace.index("rename") + 1):
        folder = tmp_path / f"at{number}"
        prepared(folder, "keep")
        store = ProfileStore(folder, pytest.fail, Flawed(number))
        if trace[number] == "remove":  # a leftover is no reason to fail
            store.keep(OLD.key, FURTHER)
            continue
        with pytest.raises(VolumeError):
            store.keep(OLD.key, FURTHER)
        assert ProfileStore(folder, pytest.fail).kept(OLD.key) == BEGUN


def test_until_the_rename_only_the_old_profile_is_there(tmp_path: Path) -> None:
    trace = traced(tmp_path / "traced", "save")
    for number in range(trace.index("rename") + 1):
        if trace[number] in ("modified_ns", "remove"):
            continue  # an order, or a leftover, is no reason to fail
        folder = tmp_path / f"at{number}"
        prepared(folder, "save")
        with pytest.raises(VolumeError):
            ProfileStore(folder, pytest.fail, Flawed(number)).save(NEW)
        assert ProfileStore(folder, pytest.fail).load(OLD.key) == OLD


def test_a_write_that_takes_less_than_it_was_given_goes_on(tmp_path: Path) -> None:
    class Slow(Disk):
        def write(self, handle: int, data: bytes) -> int:
            return super().write(handle, data[:100])

    store = ProfileStore(tmp_path, pytest.fail, Slow())
    store.save(NEW)
    assert ProfileStore(tmp_path, pytest.fail).load(NEW.key) == NEW


# A child for each line that it is told, which saves until it is killed: what they import is imported once.
SAVER = """
import os, sys
sys.path[:0] = sys.argv[1:2]
from dataclasses import replace
from pathlib import Path
from tests.builders import PARTIAL, key, profile
from appliance.profile import ProfileStore
store, number, found, other = ProfileStore(Path(sys.argv[2]), print), 0, profile(), profile(key("b2"))
for _ in sys.stdin:
    if not (child := os.fork()):
        break
    os.waitpid(child, 0)
    print("gone", flush=True)
else:
    sys.exit()
print(os.getpid(), flush=True)
while True:
    number += 1
    store.keep(key(), replace(PARTIAL, measurements=found.measurements * (number * 7 % 40)))
    store.save(replace(found, speed=f"{number} " + "x" * (number * 997 % 50000)))
    if number % 5 == 0:
        store.mark_stale(store.load(key()), f"slow {number}")
    if number % 3 == 0:
        store.pin(key().id)
        store.unpin(key().id)
    if number % 7 == 0:
        store.save(other)
        store.forget(key("b2").id)
"""


@dataclass(frozen=True)
class Saver:
    """A process that saves; its parent says when it is gone."""

    pid: int
    parent: subprocess.Popen[str]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.parent.stdout
        assert self.parent.stdout.readline() == "gone\n"


def savers(folder: Path, count: int) -> Iterator[Saver]:
    """Yield processes that save, one after the other. The test has to kill each."""
    argv = [sys.executable, "-B", "-c", SAVER, str(ROOT), str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin
        assert parent.stdout
        for _ in range(count):
            parent.stdin.write("\n")
            parent.stdin.flush()
            yield Saver(int(parent.stdout.readline()), parent)


def test_twenty_kills_of_a_process_that_saves_leave_a_whole_profile(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    store = ProfileStore(folder, pytest.fail)  # a reader that sets nothing aside
    store.save(OLD)
    rounds = random.Random(7)
    for saver in savers(folder, 20):
        for _ in range(rounds.randrange(1, 120)):
            assert store.load(key()) is not None
        saver.kill()
        found = store.load(key())
        assert found is not None
        assert replace(found, speed="") == replace(OLD, speed="")
        kept = [replace(PARTIAL, measurements=OLD.measurements * count) for count in range(40)]
        assert store.kept(key()) in (Partial(), *kept)
        assert all(one.key in (key(), key("b2")) for one in store.all())
        stale = store.why_stale(found)
        assert stale is None or found.speed.split()[0] == stale.removeprefix("slow ")
    if store.is_pinned(key().id):
        store.unpin(key().id)
    store.keep(OLD.key, PARTIAL)
    assert store.save(OLD)
    assert store.save(OTHER)
    assert not list(folder.glob(".*.tmp")), "leftovers of the killed are gone after the next save"


def test_on_a_full_disk_a_profile_can_be_forgotten_and_makes_room(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=128k") as folder:
        store = ProfileStore(folder, pytest.fail)
        store.save(OLD)
        store.save(OTHER)
        store.pin(OLD.key.id)
        assert store.mark_stale(OLD, WORDS)
        with pytest.raises(VolumeError, match="No space left on device"):
            store.save(replace(OTHER, speed="x" * 200_000))
        with (folder / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)) == 4096:
                pass
        with pytest.raises(VolumeError, match="No space left on device"):
            store.save(replace(OTHER, speed="x"))
        with pytest.raises(VolumeError, match=r"profile cannot be marked as stale: .*No space left on device"):
            store.mark_stale(OTHER, WORDS)
        assert store.load(OLD.key) == OLD
        assert store.why_stale(OLD) == WORDS
        assert store.why_stale(OTHER) is None
        assert store.unpin(OLD.key.id) == OLD
        assert store.forget(OLD.key.id).alias == OLD.plan.alias
        assert store.all() == (OTHER,)
        assert store.save(replace(OTHER, speed="x"))


def test_a_pin_that_finds_no_room_is_said(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=128k,nr_inodes=4") as folder:  # the folder, a profile, its lock, one more
        store = ProfileStore(folder, pytest.fail)
        store.save(OLD)
        (folder / "last").touch()
        with pytest.raises(VolumeError, match=r"profile cannot be pinned: .*No space left on device"):
            store.pin(OLD.key.id)
        assert not store.is_pinned(OLD.key.id)
        assert store.load(OLD.key) == OLD


def test_a_clock_that_jumps_back_changes_no_order(tmp_path: Path) -> None:
    """The volume's last writer believed in 2099; what is saved today still comes after it."""
    store = ProfileStore(tmp_path, pytest.fail)
    store.save(replace(OLD, created="2099-01-01T00:00:00+00:00"))
    os.utime(tmp_path / f"{OLD.key.id}.json", (4_070_908_800, 4_070_908_800))
    store.save(OTHER)
    assert [one.key for one in store.all()] == [OTHER.key, OLD.key]
    store.save(replace(OLD, created="1970-01-01T00:00:00+00:00"))
    first = store.all()[0]
    assert (first.key, first.created) == (OLD.key, "1970-01-01T00:00:00+00:00")
    assert store.why_unused(key("b3"), "small.gguf") == "build: b1 -> b3"


def test_a_pinned_profile_is_used_for_another_build_and_nothing_else(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path, pytest.fail)
    store.save(OLD)
    assert store.load(key("b9")) is None
    store.pin(OLD.key.id)
    for found in (store.load(key("b9")), store.peek(key("b9")), store.pinned(key())):
        assert found == OLD
    assert store.load(key("b9", kv_type="q8_0")) is None
    assert store.load(key("b9", memory_mib=8192)) is None
    assert store.peek(key("b9", size=1)) is None
    store.save(OTHER)
    assert store.load(OTHER.key) == OLD, "what was pinned comes before what fits exactly"
    assert store.peek(OTHER.key) == OLD
    store.pin(OTHER.key.id)
    assert store.load(OLD.key) == OTHER, "of two the last saved"
    for one in (OLD, OTHER):
        store.unpin(one.key.id)
    assert (store.load(OLD.key), store.load(OTHER.key)) == (OLD, OTHER)


def test_tuning_again_does_not_replace_a_pinned_profile(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path, pytest.fail)
    store.save(OLD)
    store.pin(OLD.key.id)
    store.pin(OLD.key.id)
    assert store.save(NEW) is False
    assert store.load(OLD.key) == OLD
    store.unpin(OLD.key.id)
    store.unpin(OLD.key.id)
    assert store.save(NEW) is True
    assert store.load(OLD.key) == NEW


def test_a_damaged_pinned_profile_is_measured_anew_and_then_not_pinned(tmp_path: Path) -> None:
    warnings: list[str] = []
    store = ProfileStore(tmp_path, warnings.append)
    store.save(OLD)
    store.pin(OLD.key.id)
    (tmp_path / f"{OLD.key.id}.json").write_text("{")
    assert store.peek(OLD.key) is None
    assert store.load(OLD.key) is None
    assert len(warnings) == 1
    assert store.save(NEW)
    assert store.load(OLD.key) == NEW
    assert not store.is_pinned(OLD.key.id)
