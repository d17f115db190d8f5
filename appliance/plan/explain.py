"""A plan as text for people, and as JSON for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from appliance.errors import printable
from appliance.plan.parts.choice import Choice
from appliance.plan.plan import Plan
from appliance.settings import SETTINGS, Settings


def explain(plan: Plan, *, is_verbose: bool = False) -> str:
    """Return a line for each choice: value, reason, and the fact or setting that decided. `is_verbose` adds figures."""
    width = max(len(choice.name) for choice in plan.choices)
    lines = [f"{c.name:<{width}}  {c.value}: {_reason(c, is_verbose=is_verbose)} [{c.source}]" for c in plan.choices]
    return "\n".join((*map(printable, lines), f"{'memory':<{width}}  {explain_memory(plan)}"))


def _reason(choice: Choice, *, is_verbose: bool) -> str:
    return f"{choice.reason}; {choice.detail}" if is_verbose and choice.detail else choice.reason


def summary(plan: Plan) -> str:
    """Return the knobs except the context: "kv_type f16, threads 2, ubatch 512, placement CPU".

    Speculative decoding is added if the plan has it.
    """
    told = {**dict(plan.knobs), "placement": plan.placement.describe()}
    knobs = ", ".join(f"{name} {value}" for name, value in told.items() if name != "context")
    return f"{knobs}, {plan.speculation.describe()}" if plan.speculation else knobs


def explain_memory(plan: Plan) -> str:
    m = plan.memory
    left = plan.usable_mib - m.total
    parts = [
        f"{m.weights:,.0f} weights",
        *([f"of which {m.repacked:,.0f} are copied for the CPU's kernels"] if m.repacked else []),
        f"{m.kv:,.0f} KV cache",
        *([f"{m.state:,.0f} states"] if m.state else []),
        f"{m.compute + m.output:,.0f} buffers",
        f"{m.cache:,.0f} prompt cache at most",
        *([f"{m.checkpoints:,.0f} context checkpoints at most"] if m.checkpoints else []),
    ]
    host = f"{m.total:,.0f} MiB predicted: {', '.join(parts)}, {m.overhead:,.0f} programs; " + (
        f"leaves {left:,.0f} of {plan.usable_mib:,.0f} usable" if left >= 0 else f"{-left:,.0f} more than usable"
    )
    if not plan.placement.shares:
        return host
    gpus = "; ".join(
        f"{share.device} {share.memory.total:,.0f} of {share.gpu.free_mib:,.0f} MiB" for share in plan.placement.shares
    )
    return f"{gpus}; host {host}"


def explain_settings(settings: Settings) -> str:
    """Return one line for each setting: its value and source."""
    width = max(len(name) for name in SETTINGS)
    rows = ((name, _shown(getattr(settings, name)), settings.sources[name]) for name in SETTINGS)
    return "\n".join(f"{name:<{width}}  {value} [{source}]" for name, value, source in rows)


def _shown(value: object) -> str:
    """Return a value as one line: several values with spaces between them, "None" for no value."""
    return printable(" ".join(map(str, value)) or "None" if isinstance(value, tuple) else str(value))


def as_document(plan: Plan) -> dict[str, Any]:
    """Return the plan as a document for JSON: its fields, its key, its knobs by name, and the choices with reasons."""
    document = {"key": plan.key, "knobs": dict(plan.knobs), **asdict(plan)}
    document["memory"]["total"] = plan.memory.total
    for share, shown in zip(plan.placement.shares, document["placement"]["shares"], strict=True):
        shown["memory"]["total"] = share.memory.total
    document["choices"] = [asdict(choice) for choice in plan.choices]
    return document
