"""What YaRN costs: perplexity of one text at half, one and two times the native length, as planned and as it is.

    python3 -m benchmarks.yarn --engine-dir /opt/llama --model FILE [--json]

Each row reads the same tokens of the appliance's own text, repeated where it is shorter than the context, with the
flags that the plan has: so the figures of one row are to be compared, not those of one column.
"""

from __future__ import annotations

# First: the project's own Python takes over where this one lacks what follows.
import images.own_python  # noqa: F401 # isort: skip

import argparse
import json
import math
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from appliance.engines.engine import ChunkSpec
from appliance.engines.llama.planning.memory.rope import Rope
from appliance.engines.llama.process.facts import query_facts
from appliance.engines.llama.process.perplexity import BINARY, Table, arguments
from appliance.engines.llama.process.server import environment
from appliance.image_facts import EngineFacts
from appliance.model import read_model
from appliance.plan import Plan, with_launch
from appliance.tune.trials.kv_quality import TEXT
from benchmarks.memory import planned_for

SHARES = (0.5, 1.0, 2.0)
FACTOR = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    facts = query_facts(options.engine_dir / "llama-server", {})
    model = read_model(options.model)
    native = model.native_context
    plain = planned_for(facts, options.model, {"ctx_size": str(native), "kv_type": "f16"})
    rope = Rope(architecture=model.architecture, factor=FACTOR, original=native, context=int(FACTOR * native))
    rows = []
    for share in SHARES:
        tokens = int(share * native)
        row = {"share": share, "tokens": tokens}
        for name, plan in (("plain", plain), ("yarn", with_launch(plain, rope=rope))):
            row[name] = round(perplexity(plan, facts, options.engine_dir, tokens), 2)
        rows.append(row)
        if not options.json:
            print(f"{tokens:,} tokens, {share:g} x native: plain {row['plain']}, YaRN by {FACTOR:g} {row['yarn']}")
    if options.json:
        print(json.dumps({"model": options.model.name, "native": native, "factor": FACTOR, "rows": rows}, indent=1))
    return 0


def perplexity(plan: Plan, facts: EngineFacts, engine_dir: Path, tokens: int) -> float:
    """Perplexity of one chunk of so many tokens; its second half is scored, as the program does it."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(TEXT.read_text(encoding="utf-8") * (2 + 2 * tokens // 1000), encoding="utf-8")
        chunk = ChunkSpec(chunk_tokens=tokens, chunks=1)
        argv = (str(engine_dir / BINARY), *arguments(replace(plan, context=tokens), facts, text, chunk))
        around = environment(plan, engine_dir, Path(folder))
        # One stream: how many chunks there are stands in the log, before the rows.
        done = subprocess.run(argv, env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    table = Table()
    for line in done.stdout.splitlines():
        table.add(line)
    return math.exp(table.nll[0])


if __name__ == "__main__":
    raise SystemExit(main())
