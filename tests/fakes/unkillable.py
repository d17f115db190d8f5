"""A child that SIGKILL does not end, as one that sleeps in a driver: `unkillable.py PID_FILE RELEASE [LINE]`.

A helper outside of its process group traces it: of a traced process its parent is not told the end before the tracer
is, and the tracer does not ask until the file RELEASE is there. PID_FILE gets the child's pid once it is held, or the
error of a kernel that does not let it be. Then it prints LINE, if there is one, and sleeps.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

PR_SET_PTRACER, ANY, PTRACE_SEIZE = 0x59616D61, -1, 0x4206
LIBC = ctypes.CDLL(None, use_errno=True)


def hold(target: int, release: Path, answer: int) -> None:
    os.setsid()
    done = LIBC.ptrace(PTRACE_SEIZE, target, None, None)
    os.write(answer, b"%d" % (ctypes.get_errno() if done else 0))
    os.close(answer)
    while not release.exists():
        time.sleep(0.02)
    os._exit(0)


def main(pid_file: str, release: str, line: str = "") -> None:
    LIBC.prctl(PR_SET_PTRACER, ANY, 0, 0, 0)  # where Yama restricts who may trace; an error elsewhere, and no matter
    target = os.getpid()
    answered, answer = os.pipe()
    if os.fork() == 0:
        for stream in (0, 1, 2):
            os.close(stream)  # else its pipes would stay open with it
        hold(target, Path(release), answer)
    error = int(os.read(answered, 16))
    Path(f"{pid_file}.part").write_text(f"error {os.strerror(error)}" if error else str(target))
    Path(f"{pid_file}.part").rename(pid_file)
    if line:
        print(line, flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
