"""Record of the last start for `appliance doctor`: hit or miss in torch.compile's cache, and the parts of the key that
changed since the start before."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from appliance import documents
from appliance.engines.vllm.planning.arguments.launch import compile_parts
from appliance.engines.vllm.startup.progress import compile_cache
from appliance.plan import Plan
from appliance.system.disk import Disk, put_file, read_file
from appliance.values import dataclass

NAME = "vllm-last-start.json"  # in a build's folder
_MOST_BYTES = 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LastStart:
    """The record. `is_hit` is None if nothing was compiled. `parts` are the parts of our compile key by name; `moved`
    are the names of parts that differ from the start before."""

    is_hit: bool | None
    key: str | None  # vLLM's own key, shortened
    reason: str | None  # of a miss, if vLLM gives one
    parts: Mapping[str, Any]
    moved: tuple[str, ...] = ()
    is_first: bool = True  # True if no earlier start is recorded

    def describe(self) -> str:
        if self.is_hit is None:
            return "the last start compiled nothing"
        found = f"the last start {'hit' if self.is_hit else 'missed'} it"
        key = f", key {self.key}" if self.key else ""
        if self.is_hit:
            return f"{found}{key}"
        return f"{found}{key}: {self.reason or self._why_missed()}"

    def _why_missed(self) -> str:
        if self.moved:
            return f"another {', '.join(self.moved)} than before"
        return "nothing was kept yet" if self.is_first else "all that is known of its key is as before"


def last_start(plan: Plan, lines: Iterable[str], before: LastStart | None) -> LastStart:
    """Return the record of a start that became ready, from its log."""
    found, parts = compile_cache(lines), compile_parts(plan)
    old, new = (before.parts if before else {}), _as_read(parts)
    moved = tuple(name for name in sorted(old.keys() | new.keys()) if before and old.get(name) != new.get(name))
    return LastStart(
        is_hit=found.is_hit, key=found.key, reason=found.reason, parts=parts, moved=moved, is_first=before is None
    )


def _as_read(parts: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(parts))
    return found


def load(cache_dir: Path) -> LastStart | None:
    """Return the record, or None if there is none or it cannot be read."""
    try:
        return documents.read(LastStart, documents.load(read_file(cache_dir / NAME, _MOST_BYTES)))
    except (OSError, ValueError):
        return None


def keep(plan: Plan, lines: Iterable[str], cache_dir: Path) -> None:
    """Save the record. Only warns if the volume refuses: serving goes on without it."""
    found = last_start(plan, lines, load(cache_dir))
    document = {"is_hit": found.is_hit, "key": found.key, "reason": found.reason, "is_first": found.is_first}
    text = json.dumps({**document, "parts": found.parts, "moved": found.moved}, indent=1, sort_keys=True)
    temporary = cache_dir / f".{NAME}.{secrets.token_hex(8)}.tmp"
    try:
        put_file(Disk(), cache_dir / NAME, text.encode(), temporary=temporary, modified_ns=time.time_ns())
    except OSError as error:
        _log.warning("the record of this start's compile cache cannot be saved: %s", error)
