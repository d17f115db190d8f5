"""For rounds of kills on the real vLLM: a model that two ranks can share, its processes, what each round showed."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import requests

from tests.container.stages.containers import ROOT, Stage, wait_for

ROUNDS = int(os.environ.get("APPLIANCE_TEST_ROUNDS", "2"))
RESULTS = Path(os.environ.get("APPLIANCE_TEST_RESULTS", ROOT / ".make/soak.jsonl"))
START_S = 900.0  # half a minute of imports; a cold disk and a busy machine take many times that
GONE_S = 60.0  # seconds on a machine that has nothing else to do
# Words of a command line in its tree, of one rank and of two.
TREE = {
    "api": re.compile(r"vllm\.entrypoints\.cli\.main"),
    "core": re.compile(r"VLLM::EngineCore"),
    "worker": re.compile(r"VLLM::Worker(_TP0)?$"),
    "rank1": re.compile(r"VLLM::Worker_TP1$"),
}
# SmolLM2 has nine heads, which two ranks cannot share.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
ENDLESS = {
    "messages": [{"role": "user", "content": "Go on."}],
    "max_tokens": 16000,
    "ignore_eos": True,
    "stream": True,
}


def write_model(folder: Path, tokenizer_of: Path, **shape: Any) -> None:
    """Write a model of zeros with another model's tokenizer. Its output means nothing and never ends. The entries of
    `shape` replace those of `SHAPE` in its configuration."""
    vocabulary = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    config = {**SHAPE, "vocab_size": vocabulary, **shape}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER:
        if (tokenizer_of / name).is_file():
            shutil.copy(tokenizer_of / name, folder / name)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dimensions in tensors(config):
        begin, end = end, end + 2 * math.prod(dimensions)
        entries[name] = {"dtype": "BF16", "shape": list(dimensions), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("q_proj", (q, width)),
            ("k_proj", (kv, width)),
            ("v_proj", (kv, width)),
            ("o_proj", (width, q)),
        ):
            yield f"{prefix}.self_attn.{name}.weight", shape
        for name, shape in (("gate_proj", (inner, width)), ("up_proj", (inner, width)), ("down_proj", (width, inner))):
            yield f"{prefix}.mlp.{name}.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (width,)
    yield "model.norm.weight", (width,)


def tree(stage: Stage) -> dict[str, int]:
    """Return the process ids on this machine of an engine with one rank or two, keyed by role."""
    found = processes(stage)
    return {name: pid for pid, _, line in found for name, words in TREE.items() if words.search(line)}


def everything(stage: Stage) -> set[int]:
    """Return the process ids of the engine's group, which includes helper processes of Python."""
    leader = tree(stage).get("api")
    return {pid for pid, group, _ in processes(stage) if group == leader}


def processes(stage: Stage) -> list[tuple[int, int, str]]:
    found = stage.container.top(ps_args="-eo pid,pgid,args")["Processes"]
    return [(int(pid), int(group), line.strip()) for pid, group, line in found]


def others(stage: Stage) -> set[int]:
    """Return all process ids outside the engine's group: those of the appliance, and those that left an engine's
    group."""
    leader = tree(stage).get("api")
    return {pid for pid, group, _ in processes(stage) if group != leader}


def shared(stage: Stage) -> set[str]:
    """Return segments of shared memory and sockets, except the appliance's socket to the current engine."""
    segments = stage.run("find", "/dev/shm", "-mindepth", "1")
    return set((segments + stage.run("find", "/tmp", "-type", "s", "-not", "-name", "appliance-*.sock")).split())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stream(stage: Stage) -> requests.Response:
    """Start a stream whose answer takes minutes."""
    where = f"{stage.base}/v1/chat/completions"
    reply = requests.post(where, json=ENDLESS, headers=stage.authorized(), stream=True, timeout=300)
    assert reply.status_code == 200, f"{reply.text}\n{stage.logs()}"
    return reply


def seconds_until_gone(pids: set[int], since: float) -> float:
    wait_for(lambda: not [pid for pid in pids if is_alive(pid)], GONE_S, lambda: f"alive: {pids}")
    return round(time.monotonic() - since, 2)


def note(stage: Stage, **seen: Any) -> None:
    """One line of JSON a round, kept when the tests are over: rounds of several days add up, those of one image."""
    line = {**seen, "image": stage.container.attrs["Image"], "when": datetime.now(UTC).isoformat(timespec="seconds")}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")
