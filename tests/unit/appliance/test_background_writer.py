"""What is written in the background is written whole, also what comes while it writes and stops."""

from __future__ import annotations

import threading

from appliance.system.background_writer import BackgroundWriter
from tests.process.stages.boot import eventually


def test_what_comes_while_it_writes_is_written_before_it_ends() -> None:
    """A stop in the middle of a write does not lose what came since that write began."""
    waiting = ["first"]
    written: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def write(_before: str) -> str:
        taken = [waiting.pop() for _ in range(len(waiting))]
        begun.set()
        assert go_on.wait(60)
        written.extend(taken)
        return ""

    writer = BackgroundWriter("test", write, every_s=0.0, again_s=60.0)
    writer.wake()
    assert begun.wait(60)
    waiting.append("second")
    writer.wake()
    threading.Timer(0.1, go_on.set).start()
    writer.close(60)
    assert written == ["first", "second"]


def test_a_stop_does_not_wait_for_the_next_try() -> None:
    told: list[str] = []

    def write(before: str) -> str:
        told.append(before)
        writer.wake()
        return "no room"

    writer = BackgroundWriter("test", write, every_s=0.0, again_s=600.0)
    writer.wake()
    eventually(lambda: writer.problem)
    writer.close(60)
    assert told == ["", "no room"]


def test_nothing_to_write_needs_no_thread() -> None:
    before = threading.active_count()
    BackgroundWriter("test", lambda problem: problem, every_s=0.0, again_s=0.0).close(0.0)
    assert threading.active_count() == before


def test_a_write_that_raises_does_not_end_the_writing() -> None:
    written: list[str] = []

    def write(before: str) -> str:
        written.append(before)
        if len(written) == 1:
            raise MemoryError
        return ""

    writer = BackgroundWriter("test", write, every_s=0.0, again_s=0.0)
    writer.wake()
    eventually(lambda: writer.problem)
    assert writer.silent_s == 0
    writer.close(60)
    assert written == ["", "MemoryError"]
