"""Memory that a plan needs according to llama-fit-params: the engine's own loader, run without loading.

It runs only while plans are measured. Only its figures of needed memory are used: for free memory it ignores cgroups.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from appliance.engines.engine import Install
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.arguments.loader_check import Projection
from appliance.engines.llama.process.server import environment, placement_arguments
from appliance.image_facts import EngineFacts
from appliance.plan import Plan, k_and_v
from appliance.run import RunTimeout, run

BINARY = "llama-fit-params"
TIMEOUT_S = 10.0
_LINE = re.compile(r"(CUDA\d+|Host) (\d+) (\d+) (\d+) ?")


def parse_projection(text: str) -> Projection | None:
    """Return the projection from lines `CUDA0 4692 1024 560` (device, model, context, compute, in MiB).

    None if there is no line for the host, which is always the last: then the output is incomplete.
    """
    rows = [found for line in text.splitlines() if (found := _LINE.fullmatch(line.strip(" ") + " "))]
    sizes = {row[1]: (float(row[2]), float(row[3]), float(row[4])) for row in rows}
    if "Host" not in sizes:
        return None
    host = sizes.pop("Host")
    return Projection(devices=tuple(sizes[f"CUDA{at}"] for at in range(len(sizes)) if f"CUDA{at}" in sizes), host=host)


def projection_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """Return the arguments for a plan. The program has no flag for a unified KV cache, which takes as much memory."""
    launch = launch_of(plan)
    sizes = {
        "--model": plan.model_path,
        "--ctx-size": plan.context,
        "--cache-type-k": k_and_v(plan.kv_type)[0],
        "--cache-type-v": k_and_v(plan.kv_type)[1],
        "--flash-attn": "on" if launch.flash_attention else "off",
        "--batch-size": launch.batch,
        "--ubatch-size": launch.ubatch,
        "--parallel": plan.parallel,
        "--fit-print": "on",
    }
    words = [word for flag, value in sizes.items() for word in (flag, str(value))]
    return (*words, *placement_arguments(plan, facts))


def query_projections(
    plans: Sequence[Plan], install: Install, *, budget_s: float, is_wanted: Callable[[], bool] = lambda: True
) -> tuple[Projection | None, ...]:
    """Return a projection for each plan; None if the program failed, is not in this image, or the time was up.

    It stops once `is_wanted` returns False; another thread may cause that.
    """
    binary = install.engine_dir / BINARY
    deadline = time.monotonic() + budget_s
    found: list[Projection | None] = []
    for plan in plans:
        left = min(TIMEOUT_S, deadline - time.monotonic())
        may_ask = left > 0 and is_wanted() and binary.exists()
        around = environment(plan, install.engine_dir, install.cache_dir, install.driver_dir)
        found.append(_ask(binary, plan, install.facts, around, left, is_wanted) if may_ask else None)
    return tuple(found)


def _ask(
    binary: Path,
    plan: Plan,
    facts: EngineFacts,
    around: Mapping[str, str],
    timeout_s: float,
    is_wanted: Callable[[], bool],
) -> Projection | None:
    argv = (str(binary), *projection_arguments(plan, facts))
    try:
        done = run(argv, timeout_s=timeout_s, environment=around, is_wanted=is_wanted)
    except (RunTimeout, OSError):
        return None  # without this second opinion, the plan's own figures stay
    return parse_projection(done.stdout) if done.returncode == 0 else None
