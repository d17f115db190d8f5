"""Which of our compile keys the cache on the volume has, and what the last cold compilation took: the price of a start.

The engine's own key is known only from its log, so each start that became ready is kept with both.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from appliance import documents
from appliance.engines.vllm.planning.arguments.launch import EAGER, compile_key, launch_of
from appliance.engines.vllm.startup.caches import has_key
from appliance.engines.vllm.startup.progress import compile_cache
from appliance.plan import Compilation, Plan
from appliance.system.disk import Disk, put_file, read_file
from appliance.values import dataclass

NAME = "vllm-compiled.json"  # in a build's folder
# Before any was seen here: the geometric mean of the 24 to 166 s that users report of GPUs.
USUAL_S = 63.0
_MOST_BYTES = 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """`keys` are the engine's by ours, those that a later start can use; `cold_s` is None before the first one."""

    cold_s: float | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def load(cache_dir: Path) -> Compiled:
    """Nothing where nothing is kept that can be read."""
    try:
        return documents.read(Compiled, documents.load(read_file(cache_dir / NAME, _MOST_BYTES)))
    except (OSError, ValueError):
        return Compiled()


def after(before: Compiled, plan: Plan, lines: Iterable[str]) -> Compiled:
    """With what the log of a start tells that became ready."""
    found, own = compile_cache(lines), compile_key(plan)
    if found.is_hit is None:
        return before
    keys = {ours: theirs for ours, theirs in before.keys.items() if ours != own}
    # A reason is given for what was there and could not be used: it will not be the next time either, as on CPUs.
    if found.key and (found.is_hit or found.reason is None):
        keys[own] = found.key
    return Compiled(cold_s=before.cold_s if found.is_hit else found.seconds or before.cold_s, keys=keys)


def keep(plan: Plan, lines: Iterable[str], cache_dir: Path) -> None:
    """A volume that refuses is no reason not to serve."""
    before = load(cache_dir)
    found = after(before, plan, lines)
    if found == before:
        return
    found = replace(found, keys={ours: theirs for ours, theirs in found.keys.items() if has_key(cache_dir, theirs)})
    text = json.dumps({"cold_s": found.cold_s, "keys": found.keys}, indent=1, sort_keys=True)
    temporary = cache_dir / f".{NAME}.{secrets.token_hex(8)}.tmp"
    try:
        put_file(Disk(), cache_dir / NAME, text.encode(), temporary=temporary, modified_ns=time.time_ns())
    except OSError as error:
        _log.warning("what is compiled is not kept: %s", error)


def compilations(cache_dir: Path) -> Callable[[Plan], Compilation | None]:
    """By what is there now. None for a plan that compiles nothing."""
    there = load(cache_dir)
    cold_s = there.cold_s or USUAL_S
    warm = {ours for ours, theirs in there.keys.items() if has_key(cache_dir, theirs)}

    def of(plan: Plan) -> Compilation | None:
        if launch_of(plan).graph_mode == EAGER:
            return None
        key = compile_key(plan)
        return Compilation(key=key, seconds=0.0 if key in warm else cold_s)

    return of
