"""Calls that may hang, as on a volume whose server is gone: each in a thread that neither a stop nor the exit waits
for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

from appliance.errors import VolumeError

T = TypeVar("T")
P = ParamSpec("P")

HANGS_S = 10.0  # a disk that has to spin up, or a server that is restarted, answers within this time
GLANCE_S = 0.3


def begin(call: Callable[[], T], name: str = "detached") -> Future[T]:
    """Begin the call in a thread of its own. It cannot be cancelled. Raises RuntimeError if no thread is left."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # told to whoever waits
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


async def detached(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the call's result, as `asyncio.to_thread`, whose threads are few, and waited for at the exit. On
    cancellation this returns at once, and the call goes on by itself."""
    return await asyncio.wrap_future(begin(partial(call, *args, **kwargs)))


async def answered(call: Callable[[], T], place: Path, *, within_s: float = HANGS_S) -> T:
    """Return the result of a call that uses the volume. Raises VolumeError if it takes longer than `within_s`; the call
    goes on by itself then."""
    try:
        async with asyncio.timeout(within_s):
            return await detached(call)
    except TimeoutError:
        raise no_answer(place, within_s) from None


def no_answer(place: Path, seconds: float) -> VolumeError:
    return VolumeError(
        f"volume does not answer: {place}: a call has taken more than {seconds:.0f} s",
        hint="check the disk, or the server of a network share",
    )


class Glance(Generic[T]):
    """The last result of a call that may hang, for callers that may not wait: the event loop waits GLANCE_S at most,
    and not at all while an earlier call hangs."""

    def __init__(self, call: Callable[[], T], unknown: T) -> None:
        """`unknown` stands for the result until there is one."""
        self._call = call
        self._last = unknown
        self._asking: Future[T] | None = None

    async def renew(self, place: Path) -> None:
        """Wait for a new result from the volume, as `answered`. An error is left to the next caller."""
        with suppress(VolumeError):
            self._last = await answered(self._call, place)
            self._asking = None  # an earlier call that ends later has an older result

    @property
    def last(self) -> T:
        """The last result, without a call."""
        return self._last

    def __call__(self) -> T:
        """Return the result; the last one while the call hangs. Raises the error of the call."""
        is_new = self._asking is None
        try:
            asking = self._asking = self._asking or begin(self._call)
        except RuntimeError:  # no thread is left
            return self._last
        wait((asking,), GLANCE_S if is_new else 0)
        if asking.done():
            self._asking = None
            self._last = asking.result()
        return self._last
