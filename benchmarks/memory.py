"""Predicted against allocated: plans of many small models on the real engine, and what its log says it took.

    python3 -m benchmarks.memory --engine-dir /opt/llama [--model FILE] [--only GLOB] [--cpu-variant NAME[,NAME...]|all]

Models are made here (tests/shapes), of every kind of layer that the planner knows, and thrown away; each is loaded with
the command line of its plan and ended as soon as its buffers are there. What the CPU's kernels copy depends on their
variant: `all` are those that run on this CPU.
"""

from __future__ import annotations

# First: the project's own Python takes over where this one lacks what follows.
import images.own_python  # noqa: F401 # isort: skip

import argparse
import fnmatch
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.engines.llama.planning.hardware.cpu_variant import runnable_variants
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.facts import query_facts
from appliance.engines.llama.process.server import arguments, environment, parse_allocated
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import read_model
from appliance.plan import Allocated, Plan
from appliance.probe import probe
from appliance.settings import resolve_settings
from tests.shapes import SMALL, Shape, write_gguf

TIMEOUT_S = 60.0
AIM = 0.03
# Wider and deeper than the shapes are, so that a model weighs 50 to 250 MB: in a toy the buffers would be everything.
_WIDE = {"embedding_length": 1024, "feed_forward_length": 3072, "block_count": 8}


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    quantization: str = "Q4_K_M"
    context: int = 4096
    kv_type: str = "f16"
    ubatch: int = 512
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.shape} {self.quantization} c{self.context} {self.kv_type} u{self.ubatch}"

    @property
    def flags(self) -> dict[str, str]:
        return {"ctx_size": str(self.context), "kv_type": self.kv_type, "ubatch": str(self.ubatch)}


CASES = (
    Case(shape="gqa"),
    Case(shape="gqa", context=16384, kv_type="q8_0"),
    Case(shape="gqa", quantization="Q8_0", ubatch=2048, context=8192),
    Case(shape="gqa", quantization="Q4_0", ubatch=256, context=32768, kv_type="q4_0"),
    Case(shape="qk-norm", quantization="Q6_K", context=8192),
    Case(shape="qk-norm", quantization="Q4_0", ubatch=1024, context=2048),
    Case(shape="moe"),
    Case(shape="moe", quantization="Q8_0", ubatch=1024, context=16384, kv_type="q8_0"),
    Case(shape="moe", quantization="Q4_0", ubatch=128, context=8192),
    Case(shape="sliding"),
    Case(shape="sliding", context=32768, kv_type="q8_0", ubatch=256),
    Case(shape="sliding-sinks", quantization="MXFP4", context=16384),
    Case(shape="sliding-cohere", context=16384, ubatch=1024, changes={"attention.head_count": 16}),
    Case(shape="mla", context=8192),
    Case(shape="mla", quantization="Q8_0", context=32768, ubatch=256),
    Case(shape="mla-with-drafts", context=8192),
    Case(shape="delta-net", context=8192),
    Case(shape="delta-net", quantization="Q8_0", context=32768, kv_type="q8_0", ubatch=1024),
    Case(shape="delta-net-moe", context=8192),
    Case(shape="delta-net-moe", quantization="Q8_0", context=16384, ubatch=256),
    Case(
        shape="mamba2",
        context=8192,
        changes={"ssm.inner_size": 2048, "ssm.time_step_rank": 32, "feed_forward_length": 0},
    ),
    Case(shape="jamba", context=8192, changes={"attention.head_count": 32, "ssm.inner_size": 2048}),
    Case(shape="falcon-h1", context=8192, changes={"ssm.inner_size": 2048, "ssm.time_step_rank": 32}),
    Case(
        shape="nemotron-h",
        context=8192,
        changes={"feed_forward_length": [0, 3072, 0, 3072] * 2, "attention.head_count_kv": [0, 0, 2, 0] * 2},
    ),
    Case(shape="short-convolution", context=8192, changes={"attention.head_count": 32}),
    Case(shape="kda", context=8192),
    Case(shape="shared-caches", context=16384),
    Case(shape="granite-hybrid", context=8192, changes={"ssm.inner_size": 2048, "ssm.time_step_rank": 32}),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    plan: Plan  # of one CPU variant
    allocated: Allocated

    @property
    def error(self) -> float:
        return (self.plan.predicted_mib - self.allocated.total) / self.allocated.total


def main() -> None:
    options = _options()
    facts = query_facts(options.engine_dir / "llama-server")
    rows: list[Row] = []
    print(
        f"{'model, quantization, context, KV, ubatch':40} {'CPU variant':14} {'predicted':>9} {'allocated':>9} "
        f"{'error':>7}  MiB a kind"
    )
    with tempfile.TemporaryDirectory() as folder:
        variants = _variants(options.cpu_variant, facts)
        for name, path, flags in _models(options, Path(folder)):
            for variant in variants:
                planned = planned_for(facts, path, {**flags, "cpu_variant": variant})
                allocated = allocated_by(options.engine_dir / "llama-server", planned, facts, Path(folder))
                rows.append(Row(name=name, plan=planned, allocated=allocated))
                print(_in_words(rows[-1]), flush=True)
    errors = [abs(row.error) for row in rows]
    print(
        f"\n{len(rows)} loads: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, "
        f"{sum(error <= AIM for error in errors)} within {AIM:.0%}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-dir", type=Path, default=Path("/opt/llama"))
    parser.add_argument("--model", type=Path, help="a model file that is measured as well")
    parser.add_argument("--cpu-variant", default="auto", help="names with commas, or all that run here")
    parser.add_argument("--only", default="*", help="a glob over the names of cases")
    return parser.parse_args()


def _variants(asked: str, facts: EngineFacts) -> list[str]:
    if asked != "all":
        return asked.split(",")
    return [variant.name for variant in runnable_variants(facts, probe(Path("/"), {}).cpu)]


def _models(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path, dict[str, str]]]:
    for case in CASES:
        if fnmatch.fnmatch(case.name, options.only):
            path = write_gguf(folder / "model.gguf", shape_of(case), quantization=case.quantization)
            yield case.name, path, case.flags
    if options.model:
        for context, kv_type, ubatch in ((4096, "f16", "512"), (8192, "q8_0", "512"), (8192, "f16", "2048")):
            flags = {"ctx_size": str(context), "kv_type": kv_type, "ubatch": ubatch}
            yield f"{options.model.stem[:20]} c{context} {kv_type} u{ubatch}", options.model, flags


def shape_of(case: Case) -> Shape:
    shape = SMALL[case.shape]
    layers = max(_WIDE["block_count"], shape.layers)
    return shape.changed(**{**_WIDE, "block_count": layers, "context_length": 131072, **case.changes})


def planned_for(facts: EngineFacts, path: Path, flags: dict[str, str]) -> Plan:
    image = ImageFacts(
        build_id="none", cell="none", engine="llama", engine_version="", engine_build=0, engine_commit=""
    )
    hardware = probe(path.parent, {})
    return Space(resolve_settings(flags, {}), image, facts, hardware, read_model(path)).best


def allocated_by(binary: Path, planned: Plan, facts: EngineFacts, folder: Path) -> Allocated:
    log = folder / "engine.log"
    with log.open("w") as file:
        argv = (str(binary), *arguments(planned, facts, folder / "e.sock"), "--no-warmup")
        around = environment(planned, binary.parent, folder)
        engine = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, env=around)
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while "reserve took" not in log.read_text() and engine.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            engine.kill()
            engine.wait()
            (folder / "e.sock").unlink(missing_ok=True)
    lines = log.read_text().splitlines()
    if not any("reserve took" in line for line in lines):
        raise SystemExit(f"error: {planned.model_path} did not load:\n" + "\n".join(lines[-8:]))
    return parse_allocated(lines)


def _in_words(row: Row) -> str:
    m, a = row.plan.memory, row.allocated
    kinds = (
        ("weights", m.weights + m.mapped_twice, a.model),
        ("KV", m.kv, a.kv),
        ("state", m.state, a.recurrent),
        ("compute", m.compute, a.compute),
        ("output", m.output, a.output),
    )
    words = ", ".join(f"{name} {p:.1f}/{q:.1f}" for name, p, q in kinds if p or q)
    head = f"{row.name:40} {row.plan.cpu_variant or '':14}"
    return f"{head} {row.plan.predicted_mib:9.1f} {a.total:9.1f} {row.error:7.1%}  {words}"


if __name__ == "__main__":
    main()
