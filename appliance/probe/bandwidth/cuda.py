"""The child process that measures one GPU: `python -m appliance.probe.bandwidth.cuda LIBRARY …` prints its bandwidths
as JSON.

A separate process, because a driver may hang or crash it, and because CUDA reads CUDA_VISIBLE_DEVICES once per process.
The caller sets that variable to one uuid, so device 0 is that GPU or MIG slice in every numbering. The library is the
image's own libcudart. If CUDA refuses a measurement, the figure is null and `problems` says why.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from appliance.probe.bandwidth.dram import MIB, Stream

HOST_TO_DEVICE, DEVICE_TO_DEVICE = 1, 3  # enum cudaMemcpyKind, driver_types.h
# Uploads walk through the host buffer in steps: a single buffer of 64 MiB would be read from the CPU's cache.
HOST_MIB = 512
STEP_MIB = 64
DEVICE_MIB = 512  # larger than the L2 cache of any GPU
PASSES = 5
PASS_S = 0.05
OVERLAP_S = 1.0


class CudaError(Exception):
    """A CUDA call did not return cudaSuccess."""


class Cudart:
    """The CUDA runtime calls that the measurement needs. Each raises CudaError with the runtime's own error text."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - whatever ctypes takes
        code = getattr(self._library, name)(*arguments)
        if code:
            words = self._library.cudaGetErrorString(code) or b"no words for it"
            message = f"{name}: {words.decode('utf-8', 'replace')} ({code})"
            raise CudaError(message)

    def synchronize(self) -> None:
        self.call("cudaDeviceSynchronize")

    def copy(self, target: int, source: int, size: int, kind: int) -> None:
        self.call("cudaMemcpy", ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), kind)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextmanager
    def device_memory(self, size: int) -> Iterator[int]:
        with self._memory("cudaMalloc", "cudaFree", size) as address:
            # Memory that was never written may have no pages behind it yet.
            self.call("cudaMemset", ctypes.c_void_p(address), 0x55, ctypes.c_size_t(size))
            self.synchronize()
            yield address

    @contextmanager
    def pinned_memory(self, size: int) -> Iterator[int]:
        with self._memory("cudaMallocHost", "cudaFreeHost", size) as address:
            ctypes.memset(address, 0x55, size)
            yield address

    @contextmanager
    def _memory(self, take: str, give: str, size: int) -> Iterator[int]:
        pointer = ctypes.c_void_p()
        self.call(take, ctypes.byref(pointer), ctypes.c_size_t(size))
        if pointer.value is None:
            message = f"{take}: success without an address"
            raise CudaError(message)
        try:
            yield pointer.value
        finally:
            self.call(give, pointer)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to measure. `has_pcie` is False if the GPU uses the host's memory. `dram_mib` is each thread's buffer."""

    has_pcie: bool
    threads: int
    dram_mib: int
    host_mib: int = HOST_MIB


def measure(cudart: Cudart, task: Task) -> dict[str, Any]:
    """Return GB/s by the field names of `GpuSpeed`, and `problems`. Raises CudaError if the GPU is unusable."""
    cudart.call("cudaSetDevice", 0)
    cudart.call("cudaFree", None)  # creates the CUDA context, which takes up to seconds, before anything is timed
    found: dict[str, Any] = {"problems": []}
    for measure_some in (_memory, _pinned, _overlapped, _pageable) if task.has_pcie else (_memory,):
        try:
            found |= measure_some(cudart, task)
        except (CudaError, MemoryError, OSError) as error:
            found["problems"].append(str(error))
    return found


def _memory(cudart: Cudart, _: Task) -> dict[str, float]:
    size = min(DEVICE_MIB * MIB, cudart.free_bytes() // 4)
    with cudart.device_memory(size) as source, cudart.device_memory(size) as target:
        rate = _best_rate(cudart, size, lambda: cudart.copy(target, source, size, DEVICE_TO_DEVICE))
    return {"memory_gb_s": 2 * rate}  # a copy reads every byte and writes it once


def _pinned(cudart: Cudart, task: Task) -> dict[str, float]:
    with _pinned_upload(cudart, task) as (step, upload):
        return {"pinned_gb_s": _best_rate(cudart, step, upload)}


def _overlapped(cudart: Cudart, task: Task) -> dict[str, float]:
    """Measure uploads and the CPU's reads in the same second, while they share the memory bandwidth."""
    stream = Stream(task.threads, task.dram_mib)
    with _pinned_upload(cudart, task) as (step, upload), stream.running():
        began, before, copied = time.perf_counter(), stream.bytes_read, 0
        while time.perf_counter() - began < OVERLAP_S:
            upload()
            copied += step
        cudart.synchronize()
        read, seconds = stream.bytes_read - before, time.perf_counter() - began
    return {"overlapped_pinned_gb_s": copied / seconds / 1e9, "overlapped_dram_gb_s": read / seconds / 1e9}


@contextmanager
def _pinned_upload(cudart: Cudart, task: Task) -> Iterator[tuple[int, Callable[[], None]]]:
    size, step = _sizes(task)
    with cudart.device_memory(step) as target, cudart.pinned_memory(size) as source:
        yield step, _upload(cudart, target, source, size, step)


def _pageable(cudart: Cudart, task: Task) -> dict[str, float]:
    size, step = _sizes(task)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    source = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(source, 0x55, size)
    with cudart.device_memory(step) as target:
        return {"pageable_gb_s": _best_rate(cudart, step, _upload(cudart, target, source, size, step))}


def _sizes(task: Task) -> tuple[int, int]:
    step_mib = min(STEP_MIB, task.host_mib)
    return task.host_mib // step_mib * step_mib * MIB, step_mib * MIB


def _upload(cudart: Cudart, target: int, source: int, size: int, step: int) -> Callable[[], None]:
    """Return a function that copies the next step of the source at each call."""
    offset = 0

    def upload() -> None:
        nonlocal offset
        cudart.copy(target, source + offset, step, HOST_TO_DEVICE)
        offset = (offset + step) % size

    return upload


def _best_rate(cudart: Cudart, size: int, copy: Callable[[], None]) -> float:
    """Best of PASSES passes, GB/s. `synchronize` is needed because copies within the device are only queued by the
    call."""
    count = 1
    while (seconds := _pass_s(cudart, copy, count)) < PASS_S and count < 4096:
        count *= 2
    return count * size / min(seconds, *(_pass_s(cudart, copy, count) for _ in range(PASSES))) / 1e9


def _pass_s(cudart: Cudart, copy: Callable[[], None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        copy()
    cudart.synchronize()
    return time.perf_counter() - began


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m appliance.probe.bandwidth.cuda")
    parser.add_argument("library")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dram-mib", type=int, required=True)
    parser.add_argument("--host-mib", type=int, default=HOST_MIB)
    parser.add_argument("--no-pcie", action="store_true")
    options = parser.parse_args(argv)
    task = Task(
        has_pcie=not options.no_pcie,
        threads=options.threads,
        dram_mib=options.dram_mib,
        host_mib=options.host_mib,
    )
    try:
        report = measure(Cudart(options.library), task)
    except (CudaError, OSError, AttributeError) as error:  # AttributeError: the library lacks one of the calls
        report = {"problems": [str(error)]}
    json.dump(report, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
