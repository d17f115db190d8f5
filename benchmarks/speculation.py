"""Differences of greedy answers with and without speculative decoding, by the comparison that a start makes.

Three engines are started for each kind: without it for the answers, without it again, and with it. The kinds are
n-grams, the model as its own draft, and a draft that is made here of the model's first layers.

    python3 -m benchmarks.speculation --engine DIR --model FILE [--layers 10] [--threads 1] [--only KIND]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from appliance.abilities.soak import ask_documents
from appliance.engines.engine import Client, Install
from appliance.engines.engine import load as load_engine
from appliance.engines.json_socket import JsonSocket
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.facts import query_facts
from appliance.model import read_model
from appliance.plan import Kind, Plan, SpeculationCheck
from appliance.probe import probe
from appliance.settings import resolve_settings
from appliance.tune.harmless import WINDOW, answer_plainly, continue_windows
from appliance.tune.trials.engine import Bench, running
from tests.builders import IMAGE

DOING = "the benchmark"


def cut_layers(source: Path, target: Path, layers: int) -> Path:
    """Write the model with its first layers only: a draft that is right now and then."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        of = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        value = layers if name == f"{architecture}.block_count" else field.contents()
        writer.add_key_value(name, value, kind, sub_type=of)
    for tensor in reader.tensors:
        block = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "0"
        if int(block) < layers:
            data = np.ascontiguousarray(tensor.data)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


class Compared:
    """One comparison, with an engine for each run."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self._bench, self._plan = bench, plan
        of = plan.speculation.describe() if plan.speculation else ""
        self.check = SpeculationCheck(of=of, window=WINDOW)

    def _set(self, check: SpeculationCheck) -> None:
        self.check = check

    async def _run(self, plan: Plan, work: Callable[[Client], Awaitable[None]], field: str = "") -> None:
        command = self._bench.start(plan)
        async with running(self._bench.engine, command), self._bench.engine.client(command, doing=DOING) as client:
            await work(client)
            if field:
                async with JsonSocket(command, doing=DOING, keeps_connections=False) as engine:
                    await ask_documents(engine, plan.alias, 0, lambda is_valid: self._add(field, is_valid))

    def _add(self, field: str, is_valid: bool) -> None:
        found: dict[str, Any] = {field: (*getattr(self.check, field), is_valid)}
        self.check = replace(self.check, **found)

    async def run(self) -> SpeculationCheck:
        base = replace(self._plan, speculation=None)
        await self._run(base, lambda client: answer_plainly(client, self.check, self._plan.context, self._set))
        again = lambda client: continue_windows(client, self.check, self._set, speculates=False)  # noqa: E731
        await self._run(base, again, "plain_documents")
        with_it = lambda client: continue_windows(client, self.check, self._set, speculates=True)  # noqa: E731
        await self._run(self._plan, with_it, "documents")
        return self.check.judged(is_asked_for=False)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", type=Path, required=True, metavar="DIR", help="folder of llama-server")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--layers", type=int, default=10, help="layers of the draft that is made")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--only", default="", help="ngram, own or cut")
    options = parser.parse_args(arguments)
    facts, model = query_facts(options.engine / "llama-server"), read_model(options.model)
    install = Install(engine_dir=options.engine, facts=facts, cache_dir=options.engine)
    with tempfile.TemporaryDirectory(prefix="spec") as scratch:
        bench = Bench(engine=load_engine("llama"), install=install, socket_path=Path(scratch) / "e.sock")
        settings = {"ctx_size": "4096", "threads": options.threads, "devices": "none", "parallel": "1"}
        cut = read_model(cut_layers(options.model, Path(scratch) / "cut.gguf", options.layers))
        kinds: tuple[tuple[str, Kind, int, Any], ...] = (
            ("ngram", "ngram", 16, None),
            ("own", "draft", 4, model),
            ("cut", "draft", 4, cut),
        )
        for name, kind, tokens, draft in kinds:
            if options.only not in ("", name):
                continue
            resolved = resolve_settings(settings, {})
            space = Space(resolved, IMAGE, facts, probe(Path(scratch), {}), model, draft=draft)
            plan = space.best
            plan = space.speculating(plan, space.speculation(plan, kind, tokens))
            began = time.monotonic()
            found = asyncio.run(Compared(bench, plan).run())
            only, differing = found.only, found.differing
            print(
                f"{name}: {found.windows} windows of {WINDOW} tokens; differing {differing[0]} without and "
                f"{differing[1]} with, {only[0]} and {only[1]} only there, chance {found.chance:.3g}; drafted "
                f"{found.drafted}, accepted {found.accepted}; documents valid {sum(found.plain_documents)} without, "
                f"{sum(found.documents)} with, of {len(found.documents)}; {found.verdict}; "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
