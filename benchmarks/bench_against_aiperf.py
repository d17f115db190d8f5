"""`appliance bench` and NVIDIA's aiperf against one endpoint of set pace: both figures, and their ratio.

aiperf stands in an environment of its own and is a dependency of nothing here:

    python3 -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf==0.13.0
    python3 -m benchmarks.bench_against_aiperf --aiperf /tmp/aiperf/bin/aiperf [--concurrency 1,4] [--rounds 3] [--json]

Two paces, since the two tools make prompts of different lengths for a tokenizer that neither knows: with a fixed TTFT
the times are compared, with a fixed prefill speed the prefill. Each tool runs alone, one after the other, with the same
number of requests, and the medians of the rounds are compared: other programs on the machine move single runs.
Ends with 1 when a ratio is further than 5 % from 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAKE = ROOT / "tests/fakes/fake_openai.py"
WITHIN = 0.05
TOKENS = 64
PROMPT = 2048
REQUESTS = 8  # of each worker
# A tokenizer folder without a download: bytes, and a few merges. Run by aiperf's environment, which has the library.
MAKE_TOKENIZER = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
made.train_from_iterator(["the quick brown fox jumps over the lazy dog "] * 10, trainer)
made.save(str(Path(sys.argv[1], "tokenizer.json")))
config = '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
Path(sys.argv[1], "tokenizer_config.json").write_text(config)
"""


@dataclass(frozen=True, kw_only=True)
class Pace:
    knobs: tuple[str, ...]
    compared: tuple[str, ...]


PACES = {
    "TTFT 250 ms, 20 ms a token, 80 after each tenth": Pace(
        knobs=(
            *("--ttft-ms", "250", "--prefill", "1e9", "--inter-token-ms", "20", "--jitter-ms", "2"),
            *("--stall-every", "10", "--stall-ms", "60"),
        ),
        compared=(
            "TTFT ms, p50",
            "decode tok/s, p50",
            "inter-token ms, mean",
            "gap ms, p50",
            "gap ms, p95",
            "all tok/s",
        ),
    ),
    "prefill 1,000 tok/s": Pace(
        knobs=("--prefill", "1000", "--inter-token-ms", "20"), compared=("prefill tok/s, p50",)
    ),
}


def main() -> int:
    options = _parse()
    rows = [
        {"pace": name, "concurrency": concurrency, **row}
        for name, pace in PACES.items()
        for concurrency in options.concurrency
        for row in _compare(options.aiperf, pace, concurrency, options.rounds)
    ]
    print(json.dumps(rows, indent=1) if options.json else _in_words(rows))
    return 0 if all(abs(row["ratio"] - 1) <= WITHIN for row in rows) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, required=True, help="its program")
    parser.add_argument("--concurrency", default="1,4", help="with commas [1,4]")
    parser.add_argument("--rounds", type=int, default=3, help="of each pace and concurrency [3]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    options.aiperf = options.aiperf.absolute()
    if not options.aiperf.is_file():
        parser.error(f"no such program: {options.aiperf}")
    options.concurrency = [int(word) for word in options.concurrency.split(",")]
    return options


def _compare(aiperf: Path, pace: Pace, concurrency: int, rounds: int) -> list[dict[str, Any]]:
    ours, theirs = [], []
    with _endpoint(pace.knobs) as url:
        for _ in range(rounds):
            ours.append(_ours(url, concurrency))
            theirs.append(_theirs(aiperf, url, concurrency))
    rows = []
    for name in pace.compared:
        own, other = (statistics.median(each[name] for each in found) for found in (ours, theirs))
        rows.append({"figure": name, "ours": own, "aiperf": other, "ratio": own / other})
    return rows


@contextmanager
def _endpoint(knobs: tuple[str, ...]) -> Iterator[str]:
    with subprocess.Popen([sys.executable, str(FAKE), *knobs], stdout=subprocess.PIPE, text=True) as fake:
        try:
            assert fake.stdout
            yield f"http://127.0.0.1:{fake.stdout.readline().strip()}"
        finally:
            fake.kill()


def _ours(url: str, concurrency: int) -> dict[str, float]:
    words = [url, "--json", "--prompts", str(PROMPT), "--concurrency", f"{concurrency},", "--tokens", str(TOKENS)]
    words += ["--requests", str(REQUESTS), "--limit-s", "600"]
    argv = [sys.executable, "-m", "appliance.host.bench", *words]
    done = subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    (row,) = json.loads(done.stdout)["rows"]
    return {
        "TTFT ms, p50": row["ttft_ms"]["p50"],
        "decode tok/s, p50": row["decode_tokens_per_s"]["p50"],
        "inter-token ms, mean": row["inter_token_ms"]["mean"],
        "gap ms, p50": row["inter_token_ms"]["p50"],
        "gap ms, p95": row["inter_token_ms"]["p95"],
        "all tok/s": row["throughput_tokens_per_s"],
        "prefill tok/s, p50": row["prefill_tokens_per_s"]["p50"],
    }


def _theirs(aiperf: Path, url: str, concurrency: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="against-aiperf-") as name:
        folder = Path(name)
        (folder / "tokenizer").mkdir()
        python = aiperf.with_name("python")
        subprocess.run([str(python), "-c", MAKE_TOKENIZER, str(folder / "tokenizer")], check=True, stdout=sys.stderr)
        argv = [
            *(str(aiperf), "profile", "--model", "fake", "--url", url, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", str(folder / "tokenizer"), "--use-server-token-count", "--ui", "none"),
            *("--isl", str(PROMPT), "--isl-stddev", "0", "--osl", str(TOKENS), "--osl-stddev", "0"),
            *("--concurrency", str(concurrency), "--request-count", str(REQUESTS * concurrency)),
            *("--warmup-request-count", "2", "--output-artifact-dir", str(folder / "out")),
        ]
        subprocess.run(argv, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        found = json.loads((folder / "out/profile_export_aiperf.json").read_text())
    return {
        "TTFT ms, p50": found["time_to_first_token"]["p50"],
        "decode tok/s, p50": found["output_token_throughput_per_user"]["p50"],
        "inter-token ms, mean": found["inter_token_latency"]["avg"],
        "gap ms, p50": found["inter_chunk_latency"]["p50"],
        "gap ms, p95": found["inter_chunk_latency"]["p95"],
        "all tok/s": found["output_token_throughput"]["avg"],
        "prefill tok/s, p50": found["prefill_throughput_per_user"]["p50"],
    }


def _in_words(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'pace':<46} {'at once':>7}  {'figure':<21} {'ours':>9} {'aiperf':>9} {'ratio':>6}"]
    for row in rows:
        line = f"{row['pace']:<46} {row['concurrency']:>7}  {row['figure']:<21}"
        lines.append(f"{line} {row['ours']:>9,.2f} {row['aiperf']:>9,.2f} {row['ratio']:>6.3f}")
    worst = max(abs(row["ratio"] - 1) for row in rows)
    return "\n".join([*lines, f"\nfurthest from 1: {worst:.1%}"])


if __name__ == "__main__":
    sys.exit(main())
