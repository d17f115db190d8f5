"""Takes GPU memory until little is left, as a second program does: `python -m tests.gpu.ballast LIBCUDART LEAVE_MIB`.

It says on one line of JSON how much it holds and what is left, and keeps it until its standard input is closed.
Bandwidth and compute stay those of the large card: only what fits is that of a small one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.probe.bandwidth.cuda import Cudart

MIB = 2**20


def main(library: str, leave_mib: int) -> int:
    cudart = Cudart(library)
    hold = cudart.free_bytes() - leave_mib * MIB
    if hold <= 0:
        print(f"error: less than {leave_mib} MiB are free as it is", file=sys.stderr)
        return 1
    with cudart.device_memory(hold):
        print(json.dumps({"held_mib": hold // MIB, "left_mib": cudart.free_bytes() // MIB}), flush=True)
        sys.stdin.read()
    return 0


@contextmanager
def held(engine_dir: Path, leave_mib: int | None) -> Iterator[dict[str, Any]]:
    """Hold GPU memory while the block runs. None holds nothing. Raises RuntimeError if the memory cannot be
    allocated."""
    if leave_mib is None:
        yield {}
        return
    library = next(iter(sorted(engine_dir.glob("libcudart.so*"))), "libcudart.so.13")
    argv = [sys.executable, "-m", "tests.gpu.ballast", str(library), str(leave_mib)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            message = f"GPU memory could not be taken: exit {child.wait()}, its words are above"
            raise RuntimeError(message)
        try:
            yield json.loads(line)
        finally:
            child.stdin.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
