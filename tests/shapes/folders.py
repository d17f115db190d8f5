"""Folders of safetensors as they are published, from a table of configs: real headers and sizes, no weights."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from appliance.model import Model, read_model

CONFIGS: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "folders.yaml").read_text())
_TYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "U8": 1}


def folder_model(name: str) -> Model:
    """Return the model as read from its folder; its path lies under /data/models."""
    return replace(_read(name), path=Path("/data/models") / name)


@cache
def _read(name: str) -> Model:
    with tempfile.TemporaryDirectory() as scratch:
        return read_model(write_folder(Path(scratch) / name, name), serves="safetensors")


def write_folder(folder: Path, name: str, **changes: Any) -> Path:
    """Write the folder of a published model. `changes` apply to config.json, or to its `text_config` if it has one."""
    row = CONFIGS[name]
    config = json.loads(json.dumps(row["config"]))
    (config.get("text_config") or config).update(changes)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if row.get("has_template", True):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    _write_holes(folder / "model.safetensors", list(_tensors(row)))
    return folder


def _write_holes(path: Path, tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    entries, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + _TYPE_BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def _tensors(row: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the tensors of each matrix; packed ones are 32-bit words of their bits, with their scales."""
    config = row["config"].get("text_config") or row["config"]
    width, plain = config["hidden_size"], row["plain"]
    yield "model.embed_tokens.weight", plain, (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        for name, rows, columns, is_packed in _matrices(config, layer):
            prefix = f"model.layers.{layer}.{name}"
            yield from _stored(prefix, rows, columns, row if is_packed else {**row, "packed": None})
        yield f"model.layers.{layer}.input_layernorm.weight", plain, (width,)
    for name, rows, columns, is_packed in _drafting(config):
        yield from _stored(f"mtp.layers.0.{name}", rows, columns, row if is_packed else {**row, "packed": None})
    yield "model.norm.weight", plain, (width,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", plain, (config["vocab_size"], width)


def _stored(prefix: str, rows: int, columns: int, row: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    packed = row["packed"]
    if packed is None:
        yield f"{prefix}.weight", row["plain"], (rows, columns)
    elif packed == "fp8":
        yield f"{prefix}.weight", "F8_E4M3", (rows, columns)
        yield f"{prefix}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))
    elif packed == "nvfp4":
        yield f"{prefix}.weight", "U8", (rows, columns // 2)
        yield f"{prefix}.weight_scale", "F8_E4M3", (rows, columns // 16)
        yield f"{prefix}.weight_scale_2", "F32", ()
        yield f"{prefix}.input_scale", "F32", ()
    else:
        yield f"{prefix}.qweight", "I32", (columns, rows * packed // 32)
        yield f"{prefix}.scales", "F16", (columns // 128, rows)


def _matrices(config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, int, int, bool]]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    length = config.get("head_dim") or width // heads
    every = config.get("full_attention_interval")
    if every and (layer + 1) % every:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        yield "linear_attn.in_proj_qkvz", 2 * keys + 2 * values, width, False
        yield "linear_attn.out_proj", width, values, False
    elif config.get("kv_lora_rank"):
        yield "self_attn.q_proj", heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]), width, True
        yield "self_attn.kv_a_proj", config["kv_lora_rank"] + config["qk_rope_head_dim"], width, True
        yield "self_attn.o_proj", width, heads * config["v_head_dim"], True
    else:
        queries = heads * length * (2 if every else 1)  # a gate beside each query
        kv = config["num_key_value_heads"] * length
        yield "self_attn.q_proj", queries, width, True
        yield "self_attn.k_proj", kv, width, True
        yield "self_attn.v_proj", kv, width, True
        yield "self_attn.o_proj", width, heads * length, True
    yield from _feed_forward(config)


def _drafting(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int, bool]]:
    """Yield the matrices of the draft layer: one attention layer in full precision, as published, and its
    projection."""
    if config.get("mtp_num_hidden_layers"):
        layer = int(config.get("full_attention_interval", 1)) - 1
        yield from ((name, rows, columns, False) for name, rows, columns, _ in _matrices(config, layer))
        yield "fc", config["hidden_size"], 2 * config["hidden_size"], False


def _feed_forward(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int, bool]]:
    width, experts = config["hidden_size"], config.get("num_experts") or config.get("n_routed_experts")
    if not experts:
        length = config["intermediate_size"]
        yield "mlp.gate_up_proj", 2 * length, width, True
        yield "mlp.down_proj", width, length, True
        return
    length = config["moe_intermediate_size"]
    yield "mlp.gate", experts, width, False
    yield "mlp.experts.gate_up_proj", 2 * length * experts, width, True
    yield "mlp.experts.down_proj", width * experts, length, True
