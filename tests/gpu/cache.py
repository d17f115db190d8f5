"""One model, one placement, several types of the KV cache: decode at each depth, so that a planner knows what a rounded
cache costs or gains on a card.

    python -m tests.gpu.cache --engine DIR --facts DIR --work DIR --out DIR [--shape dense] [--depths 640,8192,32768]

Prints a table and writes `cache-SHAPE.json` and `cache-SHAPE.yaml`, whose rows are as those of
benchmarks/speed_model.yaml.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
from dataclasses import replace
from pathlib import Path

from appliance.engines.llama.planning.hardware import assumptions
from appliance.plan import Plan
from appliance.probe.load.watch import Watch
from appliance.selection.select import read_inputs
from appliance.settings import Settings, load_settings, process_environment
from appliance.start.inputs import StartInputs
from appliance.supervisor import become_subreaper
from appliance.tune.trials import engine
from appliance.tune.trials.run_trial import Sampling, Step, measure
from tests.gpu.grid import CASES
from tests.shapes import write_gguf

QUANTIZATION = "Q4_K_M"
SPARE_TOKENS = 1024  # of the context, beyond the deepest look


def settings_of(options: argparse.Namespace, model: Path, kv_type: str) -> Settings:
    """Return settings with the same context for each type, so that the rest of the plan is the same."""
    fixed = {
        "model": str(model),
        "data_dir": str(model.parents[1]),
        "engine_dir": str(options.engine.resolve()),
        "facts_dir": str(options.facts.resolve()),
        "ctx_size": str(max(options.depths) + SPARE_TOKENS),
        "ubatch": "512",
        "parallel": "1",
        "log": "text",
    }
    return load_settings({**fixed, "kv_type": kv_type}, process_environment())


def look(depths: tuple[int, ...]) -> Sampling:
    return Sampling(depths=depths, is_long=True)


def written(options: argparse.Namespace) -> Path:
    model: Path = options.work.resolve() / "data/models" / f"{options.shape}.gguf"
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        unfinished = model.with_suffix(".unfinished")
        write_gguf(unfinished, CASES[options.shape].shape, quantization=QUANTIZATION, with_data=True).rename(model)
    return model


async def decoded(found: StartInputs, plan: Plan, depths: tuple[int, ...]) -> dict[int, float]:
    """Return the milliseconds of a decoded token, keyed by depth."""
    bench = engine.Bench(
        engine=found.engine, install=found.install, socket_path=found.inputs.settings.runtime_dir / "cache.sock"
    )
    seen = await measure(
        plan, look(depths), bench=bench, on_step=_silent, watch=lambda: Watch(found.inputs.hardware, {})
    )
    return {point.depth: point.decode_ms for point in seen.points}


def _silent(_: Step) -> None:
    """The table says it all."""


def table(rows: dict[str, dict[int, float]]) -> str:
    """Return a table of tokens a second; in parentheses the speed relative to `f16` at the same depth."""
    depths = sorted(rows["f16"])
    lines = [f"{'type':8}" + "".join(f"{depth:>18,}" for depth in depths)]
    for kind, by_depth in rows.items():
        cells = (f"{1000 / by_depth[at]:9.1f} ({rows['f16'][at] / by_depth[at]:5.2f})" for at in depths)
        lines.append(f"{kind:8}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def factor(exact: dict[int, float], rounded: dict[int, float]) -> float:
    """Return the cost of a cached token in the rounded type relative to the exact one: `ROUNDED_CACHE_GPU`."""
    first, last = min(exact), max(exact)
    return (rounded[last] - rounded[first]) / (exact[last] - exact[first])


def as_yaml(options: argparse.Namespace, kind: str, by_depth: dict[int, float]) -> list[str]:
    """Return rows for benchmarks/speed_model.yaml. Whoever adds them sets `held_out` by the rule of
    benchmarks/speed_model.py."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return [
        f'- {{"machine": "{options.machine}", "model": "{CASES[options.shape].shape.name}", '
        f'"quantization": "{QUANTIZATION}", "test": "tg{look(()).tokens}", "depth": {depth}, "kv_type": "{kind}", '
        f'"figure": {1000 / ms:.2f}, "source": "docs/figures.md", "date": "{today}"}}'
        for depth, ms in by_depth.items()
    ]


def numbers(words: str) -> tuple[int, ...]:
    return tuple(map(int, words.split(",")))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(CASES), default="dense")
    for name in ("engine", "facts", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    parser.add_argument("--depths", type=numbers, default=(640, 8192, 32768), metavar="LIST")
    parser.add_argument("--kinds", type=lambda words: words.split(","), default=["f16", "q8_0", "q4_0"], metavar="LIST")
    parser.add_argument("--machine", default="h100-80g", help="its name in benchmarks/speed_model.yaml [h100-80g]")
    options = parser.parse_args(argv)
    become_subreaper()
    model, rows, placements = written(options), {}, {}
    for kind in dict.fromkeys(("f16", *options.kinds)):
        found = read_inputs(settings_of(options, model, kind), process_environment())
        plan = replace(found.engine.space(found.inputs).best, speculation=None)
        rows[kind], placements[kind] = asyncio.run(decoded(found, plan, options.depths)), plan.placement.summary()
        print(f"{kind}: {placements[kind]}: {rows[kind]}", flush=True)
    if len(set(placements.values())) > 1:
        print("error: the types lie in different places, so that nothing is told of the cache", file=sys.stderr)
        return 1
    print(table(rows))
    for kind in list(rows)[1:]:
        told = f"{factor(rows['f16'], rows[kind]):.2f} (planned with {assumptions.ROUNDED_CACHE_GPU.value:g} on a GPU)"
        print(f"{kind}: a token in the cache costs {told} of one at f16")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"cache-{options.shape}.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [line for kind, by_depth in rows.items() for line in as_yaml(options, kind, by_depth)]
    (options.out / f"cache-{options.shape}.yaml").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
