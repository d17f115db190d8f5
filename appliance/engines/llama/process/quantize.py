"""llama-quantize: its command for one file."""

from __future__ import annotations

from pathlib import Path

from appliance.command import Command
from appliance.engines.engine import Ending, Install
from appliance.engines.llama.process.endings import as_error
from appliance.engines.llama.process.log import is_error
from appliance.engines.llama.process.server import cpu_environment
from appliance.errors import FatalError

BINARY = "llama-quantize"
# Rows of one tensor that the program holds as f32. Its own default is 8,192 MiB, which the engine beside it may need.
BUFFER_MIB = 512


class Quantize:
    """One run of llama-quantize, which writes `target`."""

    def __init__(
        self, install: Install, origin: Path, target: Path, kind: str, *, threads: int, cpu_variant: str | None
    ) -> None:
        words = (install.engine_dir / BINARY, "--max-buffer-size", BUFFER_MIB, origin, target, kind, threads)
        self.command = Command(
            argv=tuple(map(str, words)),
            environment=cpu_environment(install.cache_dir, cpu_variant),
            is_ready=_never,
            is_error=is_error,
            stall_timeout_s=install.stall_timeout_s,
            oom_kills=install.oom_kills,
        )

    def as_error(self, ending: Ending) -> FatalError:
        return as_error(ending, name=BINARY)


async def _never() -> bool:
    return False
