"""One load at a time on a volume, and what each container's models hold.

Two containers on one volume are on one machine, as a rule: while one looks at free memory and loads, the other waits.
Memory of GPUs is seen by the driver; mapped weights in host memory are not seen by anybody, so each container writes
down what its models hold. All of it happens in threads: a volume that hangs keeps no request waiting.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from math import inf
from pathlib import Path

from appliance.console.report import Report
from appliance.system.background_writer import BackgroundWriter
from appliance.system.detached import HANGS_S, Glance, begin

TRY_EVERY_S = 0.2
TELL_AFTER_S = 2.0
END_S = 1.0  # most time that a stop waits for the entry's removal
_FILE_BYTES_MAX = 2**16
# Without O_NONBLOCK a named pipe in the folder would keep a start waiting for ever.
_PLAIN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class VolumeLock:
    """The lock of a volume, and this container's entry beside it. A volume that cannot be locked or written is used
    without, and the log says so once."""

    def __init__(self, folder: Path, report: Report, *, hangs_s: float = HANGS_S) -> None:
        """A volume that does not give or refuse the lock within `hangs_s` is used without."""
        self._folder = folder
        self._report = report
        self._hangs_s = hangs_s
        self._entry: int | None = None
        self._path = folder / f"{secrets.token_hex(8)}.json"
        self._is_told = False
        self._unseen: Mapping[str, float] = {}
        self._given_back: deque[int] = deque()  # handles of the lock
        self._is_given_back = threading.Event()  # clear from `release` on until the lock is free
        self._is_given_back.set()
        self._of_start: int | None = None
        self._writer = BackgroundWriter("fleet", self._write, every_s=0.0, again_s=0.0)
        self.last_of_others: Glance[Mapping[str, float]] = Glance(self.of_others, {})

    @property
    def silent_s(self) -> float:
        """How long a write to the volume has taken that has not ended yet."""
        return self._writer.silent_s

    def try_now(self) -> int | None:
        """Take the lock without waiting for others; returns its handle, or None if another container has it. -1 stands
        for a volume without locks."""
        self._is_given_back.wait(self._hangs_s)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | _PLAIN, 0o660)
        except OSError as error:
            self._tell(error)
            return -1
        if not _is_file(handle):
            os.close(handle)
            self._tell(OSError(errno.EINVAL, "what is called `lock` is no file"))
            return -1
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:
            os.close(handle)
            self._tell(error)
            return -1
        return handle

    def take_early(self) -> bool:
        """Take the lock for the first block that holds it. False if another container has it."""
        self._of_start = self.try_now()
        return self._of_start is not None

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the lock while the block runs; waits for it."""
        waited_s = 0.0
        handle, self._of_start = self._of_start, None
        while handle is None and (handle := await self._tried()) is None:
            if waited_s < TELL_AFTER_S <= waited_s + TRY_EVERY_S:
                words = "another container on this volume loads a model: this load waits for it"
                self._report.info("load_waits", words)
            waited_s += TRY_EVERY_S
            await asyncio.sleep(TRY_EVERY_S)
        try:
            yield
        finally:
            self.release(handle)

    async def _tried(self) -> int | None:
        """Return as `try_now`; -1 also for a volume that hangs, and if no thread is left."""
        try:
            trying = begin(self.try_now)
        except RuntimeError:
            return -1
        waiting = asyncio.wrap_future(trying)
        try:
            await asyncio.wait((waiting,), timeout=self._hangs_s)
            return waiting.result() if waiting.done() else -1
        finally:
            if not waiting.done():
                trying.add_done_callback(_release_late)

    def release(self, handle: int) -> None:
        """Release the lock once what the models hold now is written down: who takes it next plans with that."""
        if handle >= 0:
            self._is_given_back.clear()
            self._given_back.append(handle)
            self._writer.wake()

    def write(self, unseen: Mapping[str, float]) -> None:
        """Write down what the models of this container hold and no look at free memory shows, MiB by place; soon."""
        self._unseen = unseen
        self._writer.wake()

    def _write(self, _before: str) -> str:
        """Write the entry, then release the lock. Returns what is wrong with the volume."""
        given_back = [self._given_back.popleft() for _ in range(len(self._given_back))]
        try:
            if self._writer.is_over:
                self._remove_entry()
            else:
                self._write_entry(self._unseen)
        except OSError as error:
            self._tell(error)
            return error.strerror or str(error)
        finally:
            for handle in given_back:
                os.close(handle)
                self._is_given_back.set()
        return ""

    def _write_entry(self, unseen: Mapping[str, float]) -> None:
        if self._entry is None:
            self._entry = self._make_entry()
        text = json.dumps({"unseen_mib": unseen}).encode()
        # One write, with spaces over the rest of what was longer: an empty entry would claim nothing meanwhile.
        os.pwrite(self._entry, text.ljust(os.fstat(self._entry).st_size), 0)
        os.ftruncate(self._entry, len(text))

    def _make_entry(self) -> int:
        """Make the entry and return its handle. It gets its name with its lock: others remove entries without one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        unnamed = self._path.with_suffix(".new")
        handle = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN, 0o660)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(self._path)
        except OSError:
            os.close(handle)
            unnamed.unlink(missing_ok=True)
            raise
        return handle

    def of_others(self) -> dict[str, float]:
        """Return what models of other containers hold and no look at free memory shows, MiB by place.

        Entries of containers that ended are removed.
        """
        found: dict[str, float] = {}
        for places in self._entries():
            for place, mib in places.items():
                found[place] = found.get(place, 0.0) + mib
        return found

    def close(self) -> None:
        """Remove this container's entry. Waits for END_S at most."""
        self._writer.close(END_S)

    def _remove_entry(self) -> None:
        if self._entry is not None:
            with suppress(OSError):  # an entry without its lock is removed by the next container
                self._path.unlink(missing_ok=True)
            os.close(self._entry)
            self._entry = None

    def _entries(self) -> Iterator[Mapping[str, float]]:
        try:
            paths = sorted(self._folder.glob("*.json"))
        except OSError as error:
            self._tell(error)
            return
        for path in paths:
            if path == self._path:
                continue
            try:
                handle = os.open(path, os.O_RDONLY | _PLAIN)
            except OSError:  # its container has just ended
                continue
            try:
                if (text := self._read_living(handle, path)) is not None:
                    yield _parsed(text)
            except OSError as error:
                self._tell(error)
            finally:
                os.close(handle)

    @staticmethod
    def _read_living(handle: int, path: Path) -> bytes | None:
        """Return what the entry of a living container says. None for what is no entry, and for one whose container has
        ended, which is removed."""
        if not _is_file(handle):
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(handle, _FILE_BYTES_MAX)
        with suppress(OSError):  # another container removes it at this moment
            path.unlink(missing_ok=True)
        return None

    def _tell(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            words = f"containers on this volume cannot tell each other what they load: {self._folder}: {error.strerror}"
            self._report.warning("no_volume_lock", words)


def _release_late(trying: Future[int | None]) -> None:
    """Release a lock that nobody waits for any more, in the thread that got it."""
    handle = trying.result() if trying.exception() is None else None
    if handle is not None and handle >= 0:
        os.close(handle)


def _is_file(handle: int) -> bool:
    """True for a file: no folder, pipe or device."""
    return stat.S_ISREG(os.fstat(handle).st_mode)


def _parsed(text: bytes) -> dict[str, float]:
    """Return what an entry says; empty for one that is damaged, or that is being written."""
    try:
        unseen = json.loads(text)["unseen_mib"]
        claims = {str(place): float(mib) for place, mib in unseen.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
    return {place: mib for place, mib in claims.items() if 0 <= mib < inf}
