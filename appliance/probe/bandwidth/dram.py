"""Measure how fast all cores together read host memory.

Threads run C's memchr, which reads every byte once and writes none. ctypes releases the interpreter's lock during a
call, so the threads run in parallel.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MIB = 1024 * 1024
# Minimum in total and for each thread: larger than the last-level caches of the largest server CPUs.
TOTAL_MIB = 1024
THREAD_MIB = 32
LEAST_MIB = 64  # below this, the measurement would read from the caches
STEP_MIB = 16  # read by one call: long enough that taking the interpreter's lock again does not count
WINDOW_S = 0.2
_PRESENT, _SOUGHT = 0x55, 0xAA


def buffer_mib(threads: int, usable_mib: int) -> int | None:
    """Buffer size of one thread, MiB; None if a quarter of the usable memory is too little to measure."""
    total_mib = min(max(TOTAL_MIB, THREAD_MIB * threads), usable_mib // 4)
    return max(1, total_mib // threads) if total_mib >= LEAST_MIB else None


class Stream:
    """Threads that read their own buffers until stopped. Each thread touches its buffer first, so it is NUMA-local."""

    def __init__(self, threads: int, each_mib: int) -> None:
        self._bytes = each_mib * MIB
        self._step = min(self._bytes, STEP_MIB * MIB)
        self._read = [0] * threads
        self._end = threading.Event()
        self._failure: BaseException | None = None
        self._gate = threading.Barrier(threads + 1)
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(threads)]
        self._memchr = ctypes.CDLL(None).memchr
        self._memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        self._memchr.restype = ctypes.c_void_p

    @property
    def bytes_read(self) -> int:
        return sum(self._read)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the threads during the block, which begins when every buffer is filled. Raises MemoryError if memory is
        short."""
        for thread in self._threads:
            thread.start()
        try:
            self._wait_until_filled()
            yield
        finally:
            self._end.set()
            for thread in self._threads:
                thread.join()

    def _run(self, number: int) -> None:
        try:
            with mmap.mmap(-1, self._bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                self._read_over_and_over(number, memory)
        except (OSError, ValueError, MemoryError) as error:
            self._failure = error
            self._gate.abort()
        except threading.BrokenBarrierError:
            return  # another thread had no memory and has reported it

    def _read_over_and_over(self, number: int, memory: mmap.mmap) -> None:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        try:
            # Untouched pages all map to one page of zeros, which would be read from the cache.
            ctypes.memset(address, _PRESENT, self._bytes)
            self._gate.wait()
            offset = 0
            while not self._end.is_set():
                self._memchr(address + offset, _SOUGHT, self._step)
                self._read[number] += self._step
                offset = (offset + self._step) % (self._bytes - self._bytes % self._step)
        finally:
            del view  # it keeps the mapping open

    def _wait_until_filled(self) -> None:
        try:
            self._gate.wait()
        except threading.BrokenBarrierError as error:
            message = f"memory for the measurement cannot be allocated: {self._failure}"
            raise MemoryError(message) from error


def measure_dram(threads: int, usable_mib: int, *, windows: int = 12) -> float | None:
    """Return GB/s (10^9 bytes read per second) in the best of some windows; None if too little memory is usable."""
    each_mib = buffer_mib(threads, usable_mib)
    if each_mib is None:
        return None
    stream = Stream(threads, each_mib)
    with stream.running():
        return max(_rate(stream) for _ in range(windows))


def main(argv: list[str] | None = None) -> int:
    """Run `measure_dram` as a process that can be ended at any time. Prints GB/s as JSON, null if unknown."""
    parser = argparse.ArgumentParser(prog="python -m appliance.probe.bandwidth.dram")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--usable-mib", type=int, required=True)
    options = parser.parse_args(argv)
    try:
        rate = measure_dram(options.threads, options.usable_mib)
    except MemoryError:
        rate = None
    json.dump({"dram_gb_s": rate}, sys.stdout)
    return 0


def _rate(stream: Stream) -> float:
    began, before = time.perf_counter(), stream.bytes_read
    time.sleep(WINDOW_S)
    after, ended = stream.bytes_read, time.perf_counter()
    return (after - before) / (ended - began) / 1e9


if __name__ == "__main__":
    sys.exit(main())
