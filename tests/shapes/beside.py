"""Projectors, adapters, embedders and rerankers of random weights, in shapes that the engine runs."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

MEAN, RANK = 1, 4  # llama_pooling_type


class _Writer:
    def __init__(self, path: Path, architecture: str, seed: int) -> None:
        self.gguf = gguf.GGUFWriter(path, architecture)
        self.scale = np.float32(0.02)  # the deviation of its weights
        self._random = np.random.default_rng(seed)

    def matrix(self, name: str, rows: int, columns: int) -> None:
        self.add(name, (rows, columns))

    def linear(self, name: str, rows: int, columns: int) -> None:
        self.matrix(f"{name}.weight", rows, columns)
        self.gguf.add_tensor(f"{name}.bias", np.zeros(rows, dtype=np.float32))

    def norm(self, name: str, width: int) -> None:
        self.gguf.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
        self.gguf.add_tensor(f"{name}.bias", np.zeros(width, dtype=np.float32))

    def add(self, name: str, shape: tuple[int, ...], kind: type[np.floating] = np.float16) -> None:
        values = self._random.standard_normal(shape, dtype=np.float32) * self.scale
        self.gguf.add_tensor(name, values.astype(kind))

    def close(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def write_projector(
    path: Path,
    embedding: int,
    *,
    width: int = 64,
    wide: int = 128,
    layers: int = 2,
    heads: int = 2,
    side: int = 64,
    patch: int = 8,
    seed: int = 0,
) -> Path:
    """Write a projector for images like Gemma 3's: SigLIP, a mean of 4 x 4 patches, one matrix to the model's
    `embedding`."""
    writer = _Writer(path, "clip", seed)
    meta = writer.gguf
    meta.add_type("mmproj")
    meta.add_bool("clip.has_vision_encoder", True)
    meta.add_string("clip.projector_type", "gemma3")
    for key, value in (("embedding_length", width), ("feed_forward_length", wide), ("block_count", layers),
                       ("attention.head_count", heads), ("projection_dim", embedding), ("image_size", side),
                       ("patch_size", patch)):  # fmt: skip
        meta.add_uint32(f"clip.vision.{key}", value)
    meta.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    meta.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    meta.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    meta.add_bool("clip.use_gelu", True)
    writer.add("v.patch_embd.weight", (width, 3, patch, patch))
    meta.add_tensor("v.patch_embd.bias", np.zeros(width, dtype=np.float32))
    writer.add("v.position_embd.weight", ((side // patch) ** 2, width), np.float32)
    for at in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            writer.linear(f"v.blk.{at}.{name}", width, width)
        writer.linear(f"v.blk.{at}.ffn_up", wide, width)
        writer.linear(f"v.blk.{at}.ffn_down", width, wide)
        writer.norm(f"v.blk.{at}.ln1", width)
        writer.norm(f"v.blk.{at}.ln2", width)
    writer.norm("v.post_ln", width)
    writer.add("mm.input_projection.weight", (width, embedding))
    meta.add_tensor("mm.soft_emb_norm.weight", np.ones(width, dtype=np.float32))
    writer.close()
    return path


def write_ears(path: Path, embedding: int, *, width: int = 64, wide: int = 128, layers: int = 2, seed: int = 0) -> Path:
    """Write a projector for sound like Qwen2-Audio's: Whisper's encoder and one matrix to the model's `embedding`."""
    writer = _Writer(path, "clip", seed)
    writer.scale = np.float32(0.2)
    meta = writer.gguf
    meta.add_type("mmproj")
    meta.add_bool("clip.has_audio_encoder", True)
    meta.add_string("clip.projector_type", "qwen2a")
    for key, value in (("embedding_length", width), ("feed_forward_length", wide), ("block_count", layers),
                       ("attention.head_count", 2), ("projection_dim", embedding), ("num_mel_bins", 128)):  # fmt: skip
        meta.add_uint32(f"clip.audio.{key}", value)
    meta.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    writer.add("a.conv1d.1.weight", (width, 128, 3))
    writer.add("a.conv1d.2.weight", (width, width, 3))
    for at in (1, 2):
        meta.add_tensor(f"a.conv1d.{at}.bias", np.zeros((width, 1), dtype=np.float32))
    writer.add("a.position_embd.weight", (1500, width), np.float32)
    for at in range(layers):
        for name in ("attn_q", "attn_v", "attn_out"):
            writer.linear(f"a.blk.{at}.{name}", width, width)
        writer.matrix(f"a.blk.{at}.attn_k.weight", width, width)
        writer.linear(f"a.blk.{at}.ffn_up", wide, width)
        writer.linear(f"a.blk.{at}.ffn_down", width, wide)
        writer.norm(f"a.blk.{at}.ln1", width)
        writer.norm(f"a.blk.{at}.ln2", width)
    writer.norm("a.post_ln", width)
    writer.linear("mm.a.fc", embedding, width)
    writer.close()
    return path


def write_adapter(
    path: Path, shapes: dict[str, tuple[int, int]], *, architecture: str = "llama", rank: int = 4, seed: int = 0
) -> Path:
    """Write a LoRA of these matrices of its base; each name has its rows and columns."""
    writer = _Writer(path, architecture, seed)
    writer.gguf.add_type("adapter")
    writer.gguf.add_string("adapter.type", "lora")
    writer.gguf.add_float32("adapter.lora.alpha", 2.0 * rank)
    for name, (rows, columns) in shapes.items():
        writer.matrix(f"{name}.lora_a", rank, columns)
        writer.matrix(f"{name}.lora_b", rows, rank)
    writer.close()
    return path


_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"


def write_bert(
    path: Path,
    pooling: int,
    *,
    width: int = 64,
    wide: int = 128,
    layers: int = 2,
    context: int = 512,
    scale: float = 0.5,
    seed: int = 0,
) -> Path:
    """Write a BERT with a word piece for each letter. Pooling type RANK (4) adds the head of a cross-encoder."""
    writer = _Writer(path, "bert", seed)
    writer.scale = np.float32(scale)
    meta = writer.gguf
    meta.add_block_count(layers)
    meta.add_context_length(context)
    meta.add_embedding_length(width)
    meta.add_feed_forward_length(wide)
    meta.add_head_count(2)
    meta.add_layer_norm_eps(1e-12)
    meta.add_causal_attention(False)
    meta.add_uint32("bert.pooling_type", pooling)
    tokens = [*_SPECIAL, *(f"▁{letter}" for letter in _LETTERS), *_LETTERS]
    meta.add_tokenizer_model("bert")
    meta.add_token_list(tokens)
    meta.add_token_types([3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)))
    meta.add_token_type_count(2)
    for name, at in (("padding", 0), ("unknown", 1), ("bos", 2), ("cls", 2), ("seperator", 3), ("eos", 3), ("mask", 4)):
        meta.add_uint32(f"tokenizer.ggml.{name}_token_id", at)
    writer.matrix("token_embd.weight", len(tokens), width)
    writer.add("token_types.weight", (2, width), np.float32)
    writer.add("position_embd.weight", (context, width), np.float32)
    writer.norm("token_embd_norm", width)
    for at in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.linear(f"blk.{at}.{name}", width, width)
        writer.linear(f"blk.{at}.ffn_up", wide, width)
        writer.linear(f"blk.{at}.ffn_down", width, wide)
        writer.norm(f"blk.{at}.attn_output_norm", width)
        writer.norm(f"blk.{at}.layer_output_norm", width)
    if pooling == RANK:
        writer.linear("cls", width, width)
        writer.linear("cls.output", 1, width)
    writer.close()
    return path
