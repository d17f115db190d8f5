"""What `python -m images` says and does for the host command, without building anything: copied to its place.

FAKE_BUILD_CODE is the exit code of `build`; with 0 the daemon has the image afterwards. FAKE_SELECT_ERROR is an error
of `select`, in the form of the real one.
"""

from __future__ import annotations

import json
import os
import sys

from docker.api import APIClient

CELL = "llama-cpu"


def main() -> int:
    words = sys.argv[1:]
    if words[0] == "select":
        if error := os.environ.get("FAKE_SELECT_ERROR"):
            as_data = json.dumps({"error": error, "hint": "do this", "exit_code": 10})
            print(as_data if "--json" in words else f"error: {error}\nhint: do this", file=sys.stderr)
            return 10
        print(json.dumps({"cell": CELL}))
        return 0
    if words[0] == "list":
        rows = [{"id": "llama-cu130-sm89", "cuda": "13.0", "platforms": "amd64,arm64"}]
        print(json.dumps([*rows, {"id": CELL, "cuda": None, "platforms": "amd64,arm64"}]))
        return 0
    print(f"compiling {' '.join(words)}")
    code = int(os.environ.get("FAKE_BUILD_CODE", "0"))
    if code == 0:
        name = f"appliance/{words[words.index('--model') + 1]}" if "--model" in words else "appliance"
        with APIClient(os.environ["DOCKER_HOST"], version="1.45") as client:
            client.pull(name, tag=CELL)
    return code


if __name__ == "__main__":
    sys.exit(main())
