"""The limit of open files of this process; connections count too."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from appliance.errors import ConfigError

LEAST = 128
"""A start needs about 60: /proc, pipes and sockets of two engines, probes, imports, downloads. Clients get the rest."""


SPARE = 8


def raise_limit() -> None:
    """Raise the soft limit to the hard one. Raises ConfigError if that is below `LEAST`.

    Children inherit it. The soft limit of 1,024 that containers get protects programs that call select(), which cannot
    wait for a higher descriptor; no engine calls it (README.md of `supervisor`).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST:
        message = f"the limit of open files is too low: {hard} (RLIMIT_NOFILE); {LEAST} are needed"
        raise ConfigError(message, hint="start the container with --ulimit nofile=1024:65536, or without --ulimit")
    if soft != hard:
        # A hard limit above what the kernel allows now (fs.nr_open was lowered since) cannot be reached.
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int | None:
    """Return the current limit; None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


class Spare:
    """Reserves `SPARE` descriptors until `free`: a loop that ends needs some, even if all others are open."""

    def __init__(self) -> None:
        self._descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE)]

    def free(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
