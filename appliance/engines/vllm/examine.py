"""Report of `appliance doctor` on vLLM: the choices of the plan with their reasons, and the compile cache."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.engines.engine import Install, KernelResult
from appliance.engines.vllm.planning.arguments.launch import EAGER, compile_key, launch_of
from appliance.engines.vllm.planning.arguments.variables import SOURCE as VARIABLES
from appliance.engines.vllm.startup import last_start
from appliance.engines.vllm.startup.caches import on_volume
from appliance.plan import Plan

# Choices of a plan that doctor shows, with the names that it shows them by.
_SHOWN = {
    "dtype": "dtype",
    "quantization": "quantization",
    "attention": "attention",
    "linear_attention": "linear attention",
    "kv_type": "KV cache type",
    "kv_cache": "KV cache",
    "placement": "placement",
    "kv_heads": "KV heads",
    "links": "links of ranks",
    "shm": "shared memory of ranks",
    "reserve": "reserve",
    "speculation": "speculation",
    "remote_code": "remote code",
    "tool_calls": "tool calls",
    "reasoning": "reasoning",
    "variables": "variables",
}


def examine(install: Install, plan: Plan) -> Iterator[KernelResult]:
    """Yield one line for each choice in `_SHOWN` or refused variable, and one for the compile cache."""
    for choice in plan.choices:
        if choice.source == VARIABLES and choice.is_refusal:
            words = f"variable {choice.name.upper()} is {choice.value}: {choice.reason}"
            yield KernelResult(name="variables", problem=words, hint="take it out of the container's environment")
        elif choice.name in _SHOWN:
            yield KernelResult(name=_SHOWN[choice.name], words=f"{choice.value}: {choice.reason}")
    yield KernelResult(name="compile cache", words=_compile_cache(install, plan))


def _compile_cache(install: Install, plan: Plan) -> str:
    keys, size_mib = on_volume(install.cache_dir)
    kept = f"{keys} key{'s' * (keys != 1)} of torch.compile, {size_mib:,.0f} MiB of all that was compiled"
    before = last_start.load(install.cache_dir)
    last = before.describe() if before else "no start is kept"
    if launch_of(plan).graph_mode == EAGER:
        return f"{kept}; {last}; this plan is eager and compiles nothing"
    return f"{kept}; {last}; this plan's own key is {compile_key(plan)}"
