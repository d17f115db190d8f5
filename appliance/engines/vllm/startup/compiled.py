"""Record of compiled plans and of the last cold compilation's duration, to predict how long a start takes.

A plan has a compile key of ours. vLLM has a key of its own, which only its log tells. So each start that became ready
is recorded with both keys.
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
# Used before this machine compiled anything: the geometric mean of the 24 to 166 s that users report for GPUs.
USUAL_S = 63.0
_MOST_BYTES = 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The record. `keys` maps our keys to vLLM's, for compilations that a later start can reuse. `cold_s` is the last
    cold compilation's duration, None before the first."""

    cold_s: float | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def load(cache_dir: Path) -> Compiled:
    """Return the record; an empty one if there is none or it cannot be read."""
    try:
        return documents.read(Compiled, documents.load(read_file(cache_dir / NAME, _MOST_BYTES)))
    except (OSError, ValueError):
        return Compiled()


def after(before: Compiled, plan: Plan, lines: Iterable[str]) -> Compiled:
    """Return the record after a start that became ready; `lines` are the log of that start."""
    found, own = compile_cache(lines), compile_key(plan)
    if found.is_hit is None:
        return before
    keys = {ours: theirs for ours, theirs in before.keys.items() if ours != own}
    # vLLM gives a reason if the key existed but could not be loaded, as on CPUs. It will fail again, so it is not kept.
    if found.key and (found.is_hit or found.reason is None):
        keys[own] = found.key
    return Compiled(cold_s=before.cold_s if found.is_hit else found.seconds or before.cold_s, keys=keys)


def keep(plan: Plan, lines: Iterable[str], cache_dir: Path) -> None:
    """Save the record. Only warns if the volume refuses: serving goes on without it."""
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
        _log.warning("the record of compiled plans cannot be saved: %s", error)


def compilations(cache_dir: Path) -> Callable[[Plan], Compilation | None]:
    """Return a function that predicts the compilation of a plan from the volume's present content. It returns None for
    a plan that compiles nothing, and 0 s if the plan's key is in the cache."""
    there = load(cache_dir)
    cold_s = there.cold_s or USUAL_S
    warm = {ours for ours, theirs in there.keys.items() if has_key(cache_dir, theirs)}

    def of(plan: Plan) -> Compilation | None:
        if launch_of(plan).graph_mode == EAGER:
            return None
        key = compile_key(plan)
        return Compilation(key=key, seconds=0.0 if key in warm else cold_s)

    return of
