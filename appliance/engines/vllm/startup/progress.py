"""Progress of a start, result of its compile cache, and allocated memory, read from known lines of the log.

Unknown lines are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from appliance.engines.engine import LoadStep
from appliance.engines.vllm.process.log import parse_line
from appliance.plan import Allocated
from appliance.values import dataclass


class Stage(StrEnum):
    BIND = "bind"
    IMPORTS = "imports"
    WEIGHTS = "weights"
    COMPILE = "compile"
    PROFILE = "profile"
    GRAPHS = "graphs"
    WARM_UP = "warm-up"
    FIRST_TOKEN = "first token"  # noqa: S105 - of a text


# Patterns are tried from the top. Named groups become facts of the step and are inserted into its words.
_KNOWN: tuple[tuple[Stage, str, str], ...] = (
    (Stage.BIND, r"non-default args: ", "its socket is bound; the engine imports its libraries"),
    (Stage.IMPORTS, r"Initializing a V1 LLM engine \(v(?P<version>[^)]+)\)", "version {version} is imported"),
    (Stage.WEIGHTS, r"Starting to load model ", "weights are being loaded"),
    (
        Stage.WEIGHTS,
        r"Loading \w+ checkpoint shards: +(?P<percent>\d+)% Completed \| (?P<done>\d+)/(?P<files>\d+)",
        "file {done} of {files}",
    ),
    (Stage.WEIGHTS, r"Loading weights took (?P<seconds>[0-9.]+) seconds", "read in {seconds} s"),
    (Stage.COMPILE, r"Starting torch\.compile", "the model is being compiled, or taken from the cache"),
    (
        Stage.COMPILE,
        r"Compiling model again due to a load failure from .*?/(?P<key>[0-9a-f]{8,64})/rank\S*, reason: (?P<reason>.*)",
        "cache miss, key {key}: {reason}",
    ),
    (
        Stage.COMPILE,
        r"Directly load AOT compilation from path .*?/(?P<key>[0-9a-f]{8,64})/rank",
        "cache hit, key {key}",
    ),
    (Stage.COMPILE, r"Using cache directory: .*/torch_compile_cache/(?P<key>[0-9a-f]{8,64})/", "key {key}"),
    (
        Stage.COMPILE,
        r"Directly load the compiled graph\(s\) for compile range (?P<range>.*?) from the cache",
        "cache hit",
    ),
    (Stage.COMPILE, r"Dynamo bytecode transform time: (?P<seconds>[0-9.]+) s", "traced in {seconds} s"),
    (
        Stage.COMPILE,
        r"Compiling a graph for compile range (?P<range>.*?) takes (?P<seconds>[0-9.]+) s",
        "cache miss, {seconds} s",
    ),
    (Stage.COMPILE, r"torch\.compile (?:took|takes) (?P<seconds>[0-9.]+) s in total", "{seconds} s"),
    (Stage.PROFILE, r"Available KV cache memory: (?P<gib>-?[0-9.]+) GiB", "{gib} GiB are left for the KV cache"),
    (Stage.PROFILE, r"reserved (?P<gib>[0-9.]+) GiB memory for KV Cache as specified", "{gib} GiB are the KV cache's"),
    (Stage.PROFILE, r"KV cache size: (?P<tokens>[0-9,]+) tokens", "room for {tokens} tokens"),
    (Stage.GRAPHS, r"Capturing CUDA graphs.*?: +(?P<percent>\d+)%", "{percent} %"),
    (Stage.GRAPHS, r"Graph capturing finished in (?P<seconds>[0-9.]+) secs", "captured in {seconds} s"),
    (Stage.WARM_UP, r"^Warming up |Compile and warming up model for size", "kernels are being compiled"),
    (
        Stage.WARM_UP,
        r"init engine \(profile, create kv cache, warmup model\) took (?P<seconds>[0-9.]+) s",
        "{seconds} s since the weights",
    ),
    (Stage.FIRST_TOKEN, r"Application startup complete", "waiting for the first token"),
)
_ROWS = tuple((stage, re.compile(pattern), words) for stage, pattern, words in _KNOWN)
_CACHE = re.compile(r"^cache (?P<cache>hit|miss)\b")  # matches the words of a row above, not the log
_COMPILED = re.compile(r"torch\.compile (?:took|takes) ([0-9.]+) s in total")
_SHORT_KEY = 10
_GIB = 1024.0


def step_of(line: str) -> LoadStep | None:
    """Return the progress that a log line reports; None for all other lines."""
    text = parse_line(line).text
    for stage, pattern, words in _ROWS:
        if found := pattern.search(text):
            facts = {name: value[:_SHORT_KEY] if name == "key" else value for name, value in found.groupdict().items()}
            facts |= outcome.groupdict() if (outcome := _CACHE.match(words)) else {}
            return LoadStep(stage=str(stage), words=f"{stage}: {words.format(**facts)}", facts=facts)
    return None


@dataclass(frozen=True, kw_only=True)
class CompileCache:
    """Result of torch.compile's cache in one start. `is_hit` is None if nothing was compiled."""

    is_hit: bool | None = None
    key: str | None = None
    reason: str | None = None  # of a miss, if vLLM gives one
    seconds: float | None = None  # duration of compiling


def compile_cache(lines: Iterable[str]) -> CompileCache:
    """Return the result of the cache from a start's log. One part that missed makes it a miss: that part was
    compiled."""
    lines = tuple(lines)
    steps = [step.facts for line in lines if (step := step_of(line)) and step.stage == Stage.COMPILE]
    outcomes = [facts["cache"] for facts in steps if "cache" in facts]
    return CompileCache(
        is_hit="miss" not in outcomes if outcomes else None,
        key=next((facts["key"] for facts in steps if "key" in facts), None),
        reason=next((facts["reason"] for facts in steps if "reason" in facts), None),
        seconds=max((float(found[1]) for line in lines if (found := _COMPILED.search(line))), default=None),
    )


_ALLOCATED = (
    ("model", re.compile(r"Model loading took ([0-9.]+) GiB memory")),
    ("kv", re.compile(r"Available KV cache memory: ([0-9.]+) GiB")),
    ("kv", re.compile(r"reserved ([0-9.]+) GiB memory for KV Cache as specified by kv_cache_memory_bytes")),
    ("kv", re.compile(r"Explicitly set \(([0-9.]+)/[0-9.]+\) GiB for KV cache")),
    ("compute", re.compile(r"Graph capturing finished in \d+ secs, took ([0-9.]+) GiB")),
)


_KV_TOKENS = re.compile(r"\w+ KV cache size: ([0-9,]+) tokens")


def parse_allocated(lines: Iterable[str]) -> Allocated:
    """Return what the engine allocated, from its log: MiB rounded to 0.01 GiB, and the exact number of KV cache tokens.

    `kv` is the cache of one rank. All ranks get the smallest one's size; only the first prints the number of tokens.
    """
    sizes: dict[str, list[float]] = {"model": [], "kv": [], "compute": []}
    tokens = 0
    for line in lines:
        if found := _KV_TOKENS.search(line):
            tokens = int(found[1].replace(",", ""))
        for kind, pattern in _ALLOCATED:
            if found := pattern.search(line):
                sizes[kind].append(float(found[1]) * _GIB)
    return Allocated(
        model=sum(sizes["model"]), kv=min(sizes["kv"], default=0.0), compute=sum(sizes["compute"]), kv_tokens=tokens
    )
