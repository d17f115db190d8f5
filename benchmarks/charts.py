"""The charts of docs/decisions.md, from the planner that ships and the published results that judge it.

    python3 -m benchmarks.charts [--out docs/charts]

`predicted.svg`: predicted against published speeds, each half of the data in a color of its own. `context.svg`: what a
laptop's plan costs and gives as the context grows: the plans of one model for each context length, predicted.
`placement.svg`: the same model on growing cards: how much of it lies on the GPU, and what that brings.
"""

from __future__ import annotations

# First: the project's own Python takes over where this one lacks what follows.
import images.own_python  # noqa: F401 # isort: skip

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from appliance.engines.llama.planning.space import Space
from appliance.errors import ModelDoesNotFitError
from appliance.plan import Plan
from appliance.probe import Hardware
from appliance.settings import resolve_settings
from benchmarks import speed_model
from tests.builders import facts_for, model
from tests.golden.machines import MACHINES

OUT = Path("docs/charts")
MACHINE, MODEL, QUANTIZATION = "laptop-5060", "qwen3-30b-a3b", "Q3_K_M"
CONTEXTS = (2048, 4096, 8192, 16384, 24576, 32768, 40960)  # the last is the model's native length
CARDS_GIB = (6, 8, 10, 12, 16, 20, 24)

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "charts"  # else ids differ from one run to the next
mpl.rcParams["svg.fonttype"] = "none"  # text stays text


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    plan: Plan


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("predicted", _predicted), ("context", _context), ("placement", _placement)):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        draw(figure.subplots())
        figure.savefig(out / f"{name}.svg", metadata={"Date": None})
        print(out / f"{name}.svg")
    return 0


def _predicted(axes: Axes) -> None:
    rows = speed_model.compare(speed_model.load_data())
    for held_out, label, marker in ((False, "fitted", "o"), (True, "held out", "x")):
        half = [row for row in rows if row.result.held_out is held_out]
        published = [row.result.figure for row in half]
        axes.scatter(published, [row.predicted for row in half], label=f"{label}: {len(half)}", marker=marker, s=18)
    ends = (min(row.result.figure for row in rows), max(row.result.figure for row in rows))
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    for factor in (0.5, 1.5):
        axes.plot(ends, [factor * end for end in ends], color="gray", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="published, tokens/s", ylabel="predicted, tokens/s")
    axes.legend(title="results of others; dotted: 50 % off")


def _context(axes: Axes) -> None:
    points = list(_at_contexts(MACHINES[MACHINE]))
    axes.plot([point.x for point in points], [_decode(point.plan) for point in points], marker="o", label="decode")
    for point in points:
        at, experts = (point.x, _decode(point.plan)), point.plan.placement.cpu_expert_layers
        axes.annotate(f"{point.plan.kv_type}, {experts}", at, xytext=(0, 7), textcoords="offset points", fontsize=8)
    chosen = _space(MACHINES[MACHINE]).best
    axes.axvline(chosen.context, color="gray", linestyle=":", label=f"chosen by mode balanced: {chosen.context:,}")
    axes.set(xlabel="context length, tokens", ylabel="predicted decode, tokens/s", ylim=(0, 70), xlim=(0, 45_000))
    axes.set_xticks(CONTEXTS, [f"{context // 1024}K" for context in CONTEXTS])
    title = f"{MODEL} at {QUANTIZATION}, 8 GB laptop GPU: KV cache, layers whose experts are in host memory"
    axes.set_title(title, fontsize=9)
    axes.legend()


def _at_contexts(hardware: Hardware) -> Iterator[Point]:
    for context in CONTEXTS:
        try:
            yield Point(x=context, plan=_space(hardware, ctx_size=str(context)).best)
        except ModelDoesNotFitError:
            return


def _placement(axes: Axes) -> None:
    points = [Point(x=gib, plan=_space(_with_card(gib), ctx_size="16384").best) for gib in CARDS_GIB]
    axes.bar([str(point.x) for point in points], [_decode(point.plan) for point in points])
    for at, point in enumerate(points):
        axes.annotate(_where(point.plan), (at, _decode(point.plan)), ha="center", va="bottom", fontsize=8)
    axes.set(xlabel="memory of the GPU, GiB", ylabel="predicted decode, tokens/s")
    axes.set_title(
        f"{MODEL} at {QUANTIZATION}, context 16K; above: layers whose experts stay in host memory", fontsize=9
    )


def _with_card(gib: int) -> Hardware:
    hardware = MACHINES[MACHINE]
    (card,) = hardware.gpus.gpus
    used = card.vram_total_mib - card.vram_free_mib
    card = replace(card, vram_total_mib=gib * 1024, vram_free_mib=gib * 1024 - used)
    return replace(hardware, gpus=replace(hardware.gpus, gpus=(card,)))


def _space(hardware: Hardware, **flags: str) -> Space:
    image, engine = facts_for(hardware)
    settings = resolve_settings({"alias": MODEL, **flags}, {})
    return Space(settings, image, engine, hardware, model(MODEL, QUANTIZATION))


def _decode(plan: Plan) -> float:
    return plan.speed.decode_tokens_per_s


def _where(plan: Plan) -> str:
    return str(plan.placement.cpu_expert_layers) if not plan.placement.cpu_layers else "CPU"


if __name__ == "__main__":
    raise SystemExit(main())
