"""The tensors of a model of some shape: names and shapes as created by `load_arch_tensors` in llama.cpp's
src/models/<name>.cpp. A tensor's shape has its innermost dimension first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from appliance.model.shapes.shape import Shape

Tensors = Iterator[tuple[str, tuple[int, ...]]]
_PATTERN = "attention.sliding_window_pattern"
_ALTUPS, _ALTUP_WIDTH, _LAUREL_RANK = 4, 256, 64  # n_altup, n_embd_altup, laurel_rank of llama-hparams.h


def tensors(shape: Shape) -> Tensors:
    width, vocabulary = shape.get("embedding_length"), shape.vocabulary
    yield "token_embd.weight", (width, vocabulary)
    yield from BESIDE.get(shape.architecture, _nothing)(shape)
    for layer in range(shape.layers):
        for name, size in BLOCKS[shape.architecture](shape, layer):
            yield f"blk.{layer}.{name}", size
        if layer >= shape.trunk:
            for name, size in _draft(width):
                yield f"blk.{layer}.nextn.{name}.weight", size
    yield ("token_embd_norm.weight" if shape.architecture == "lfm2" else "output_norm.weight"), (width,)
    if not shape.is_tied:
        yield "output.weight", (width, vocabulary)


def _draft(width: int) -> Tensors:
    yield "eh_proj", (2 * width, width)
    yield "enorm", (width,)
    yield "hnorm", (width,)
    yield "shared_head_norm", (width,)


def _attention(shape: Shape, layer: int, *, has_bias: bool = False, has_norms: bool = False, gates: int = 1) -> Tensors:
    width, heads = shape.get("embedding_length"), shape.of_layer("attention.head_count", layer)
    kv_heads = shape.of_layer("attention.head_count_kv", layer, heads)
    key = shape.get("attention.key_length", width // heads)
    value = shape.get("attention.value_length", width // heads)
    for name, rows in (("q", key * heads * gates), ("k", key * kv_heads), ("v", value * kv_heads)):
        yield f"attn_{name}.weight", (width, rows)
        if has_bias:
            yield f"attn_{name}.bias", (rows,)
    yield "attn_output.weight", (value * heads, width)
    if has_bias:
        yield "attn_output.bias", (width,)
    if has_norms:
        yield "attn_q_norm.weight", (key,)
        yield "attn_k_norm.weight", (key,)


def _latent_attention(shape: Shape, _: int) -> Tensors:
    width, heads = shape.get("embedding_length"), shape.get("attention.head_count")
    query, latent = shape.get("attention.q_lora_rank"), shape.get("attention.kv_lora_rank")
    rope = shape.get("rope.dimension_count")
    is_cached = "attention.key_length_mla" in shape.metadata
    key = shape.get("attention.key_length_mla" if is_cached else "attention.key_length")
    value = shape.get("attention.value_length_mla" if is_cached else "attention.value_length")
    if query:
        yield "attn_q_a_norm.weight", (query,)
        yield "attn_q_a.weight", (width, query)
        yield "attn_q_b.weight", (query, heads * key)
    else:
        yield "attn_q.weight", (width, heads * key)
    yield "attn_kv_a_norm.weight", (latent,)
    yield "attn_kv_a_mqa.weight", (width, latent + rope)
    if is_cached:
        yield "attn_k_b.weight", (key - rope, latent, heads)
        yield "attn_v_b.weight", (latent, value, heads)
    else:
        yield "attn_kv_b.weight", (latent, heads * (key - rope + value))
    yield "attn_output.weight", (heads * value, width)


def _delta_net(shape: Shape) -> Tensors:
    width, state, heads = shape.get("embedding_length"), shape.get("ssm.state_size"), shape.get("ssm.time_step_rank")
    keys, values = state * shape.get("ssm.group_count"), state * heads
    yield "attn_qkv.weight", (width, 2 * keys + values)
    yield "attn_gate.weight", (width, values)
    yield "ssm_conv1d.weight", (shape.get("ssm.conv_kernel"), 2 * keys + values)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads,)
    if shape.architecture == "qwen3next":
        yield "ssm_ba.weight", (width, 2 * heads)
    else:
        yield "ssm_beta.weight", (width, heads)
        yield "ssm_alpha.weight", (width, heads)
    yield "ssm_norm.weight", (state,)
    yield "ssm_out.weight", (values, width)


def _mamba_1(shape: Shape, *, has_norms: bool) -> Tensors:
    width, inner, state = shape.get("embedding_length"), shape.get("ssm.inner_size"), shape.get("ssm.state_size")
    rank = shape.get("ssm.time_step_rank")
    yield "ssm_in.weight", (width, 2 * inner)
    yield "ssm_conv1d.weight", (shape.get("ssm.conv_kernel"), inner)
    yield "ssm_conv1d.bias", (inner,)
    yield "ssm_x.weight", (inner, rank + 2 * state)
    yield "ssm_dt.weight", (rank, inner)
    yield "ssm_dt.bias", (inner,)
    if has_norms:
        for name, size in (("dt", rank), ("b", state), ("c", state)):
            yield f"ssm_{name}_norm.weight", (size,)
    yield "ssm_a", (state, inner)
    yield "ssm_d", (inner,)
    yield "ssm_out.weight", (inner, width)


def _mamba_2(shape: Shape) -> Tensors:
    width, inner, groups = shape.get("embedding_length"), shape.get("ssm.inner_size"), shape.get("ssm.group_count")
    rank = shape.get("ssm.time_step_rank")
    convolved = inner + 2 * groups * shape.get("ssm.state_size")
    yield "ssm_in.weight", (width, inner + convolved + rank)
    yield "ssm_conv1d.weight", (shape.get("ssm.conv_kernel"), convolved)
    yield "ssm_conv1d.bias", (convolved,)
    yield "ssm_dt.bias", (rank,)
    yield "ssm_a", (1, rank)
    yield "ssm_d", (1, rank)
    yield "ssm_norm.weight", (inner // groups, groups)
    yield "ssm_out.weight", (inner, width)


def _short_convolution(shape: Shape) -> Tensors:
    width = shape.get("embedding_length")
    yield "shortconv.conv.weight", (shape.get("shortconv.l_cache"), width)
    yield "shortconv.in_proj.weight", (width, 3 * width)
    yield "shortconv.out_proj.weight", (width, width)


def _kda(shape: Shape) -> Tensors:
    width, length, heads = shape.get("embedding_length"), shape.get("kda.head_dim"), shape.get("attention.head_count")
    inner = length * heads
    for name in "qkv":
        yield f"ssm_conv1d_{name}.weight", (shape.get("ssm.conv_kernel"), 1, inner)
        yield f"attn_{name}.weight", (width, inner)
    for name in "fg":
        yield f"ssm_{name}_a.weight", (width, length)
        yield f"ssm_{name}_b.weight", (length, inner)
    yield "ssm_beta.weight", (width, heads)
    yield "ssm_a", (1, heads)
    yield "ssm_dt.bias", (inner,)
    yield "ssm_norm.weight", (length,)
    yield "attn_output.weight", (inner, width)


def _dense(shape: Shape, layer: int) -> Tensors:
    width, rows = shape.get("embedding_length"), shape.of_layer("feed_forward_length", layer)
    yield "ffn_gate.weight", (width, rows)
    yield "ffn_up.weight", (width, rows)
    yield "ffn_down.weight", (rows, width)


def _experts(shape: Shape, *, has_bias: bool = False, shared: int = 0, has_gate: bool = False) -> Tensors:
    width, count = shape.get("embedding_length"), shape.get("expert_count")
    rows = shape.get("expert_feed_forward_length", shape.of_layer("feed_forward_length", 0))
    yield "ffn_gate_inp.weight", (width, count)
    if has_bias:
        yield "ffn_gate_inp.bias", (count,)
    for name, size in (("gate", (width, rows)), ("up", (width, rows)), ("down", (rows, width))):
        yield f"ffn_{name}_exps.weight", (*size, count)
        if has_bias:
            yield f"ffn_{name}_exps.bias", (size[1], count)
        if shared:
            yield f"ffn_{name}_shexp.weight", (shared, width) if name == "down" else (width, shared)
    if has_gate:
        yield "ffn_gate_inp_shexp.weight", (width,)


def _norms(shape: Shape, *names: str) -> Tensors:
    for name in names:
        yield f"{name}.weight", (shape.get("embedding_length"),)


def _plain(shape: Shape, layer: int) -> Tensors:
    has_norms = shape.architecture in {"gemma3", "gemma3n", "qwen3", "qwen3moe"}
    yield from _norms(shape, "attn_norm", "ffn_norm")
    yield from _attention(shape, layer, has_norms=has_norms)
    yield from _experts(shape) if shape.get("expert_count") else _dense(shape, layer)
    if shape.architecture.startswith("gemma"):
        yield from _norms(shape, "post_attention_norm", "post_ffw_norm")


def _cohere(shape: Shape, layer: int) -> Tensors:
    yield from _norms(shape, "attn_norm")
    yield from _attention(shape, layer)
    yield from _dense(shape, layer)


def _qwen2(shape: Shape, layer: int) -> Tensors:
    """Yield the tensors of a layer: Q, K and V have a bias, the output has none."""
    yield from _norms(shape, "attn_norm", "ffn_norm")
    found = _attention(shape, layer, has_bias=True)
    yield from (entry for entry in found if entry[0] != "attn_output.bias")
    if shape.get("expert_count"):
        yield from _experts(shape, shared=shape.get("expert_shared_feed_forward_length"), has_gate=True)
    else:
        yield from _dense(shape, layer)


def _phi3(shape: Shape, layer: int) -> Tensors:
    """Yield the tensors of a layer: Q, K and V are one matrix, and gate and up are one."""
    width, rows = shape.get("embedding_length"), shape.of_layer("feed_forward_length", layer)
    key = width // shape.get("attention.head_count")
    yield from _norms(shape, "attn_norm", "ffn_norm")
    yield "attn_qkv.weight", (width, width + 2 * key * shape.get("attention.head_count_kv"))
    yield "attn_output.weight", (width, width)
    yield "ffn_up.weight", (width, 2 * rows)
    yield "ffn_down.weight", (rows, width)


def _gpt_oss(shape: Shape, layer: int) -> Tensors:
    yield from _norms(shape, "attn_norm", "post_attention_norm")
    yield from _attention(shape, layer, has_bias=True)
    yield "attn_sinks.weight", (shape.get("attention.head_count"),)
    yield from _experts(shape, has_bias=True)


def _deepseek(shape: Shape, layer: int) -> Tensors:
    yield from _norms(shape, "attn_norm", "ffn_norm")
    if shape.of_layer("attention.head_count_kv", layer):
        yield from _latent_attention(shape, layer)
    else:
        yield from _kda(shape)
    if layer < shape.get("leading_dense_block_count"):
        yield from _dense(shape, layer)
    else:
        yield from _experts(shape, shared=shape.get("expert_feed_forward_length") * shape.get("expert_shared_count"))
        yield "exp_probs_b.bias", (shape.get("expert_count"),)


def _qwen35(shape: Shape, layer: int) -> Tensors:
    yield from _norms(shape, "attn_norm", "post_attention_norm")
    if layer < shape.trunk and (layer + 1) % shape.get("full_attention_interval"):
        yield from _delta_net(shape)
    else:
        yield from _attention(shape, layer, has_norms=True, gates=2)
    if shape.get("expert_count"):
        yield from _experts(shape, shared=shape.get("expert_shared_feed_forward_length"), has_gate=True)
    else:
        yield from _dense(shape, layer)


def _mamba(shape: Shape, _: int) -> Tensors:
    yield from _norms(shape, "attn_norm")
    yield from _mamba_1(shape, has_norms=False) if shape.architecture == "mamba" else _mamba_2(shape)


def _granite_hybrid(shape: Shape, layer: int) -> Tensors:
    yield from _norms(shape, "attn_norm", "ffn_norm")
    is_attention = shape.of_layer("attention.head_count_kv", layer)
    yield from _attention(shape, layer) if is_attention else _mamba_2(shape)
    yield from _dense(shape, layer)


def _minimax(shape: Shape, layer: int) -> Tensors:
    width, inner = shape.get("embedding_length"), shape.get("attention.head_count") * shape.get("attention.key_length")
    yield from _norms(shape, "attn_norm", "ffn_norm")
    if (layer + 1) % shape.get("full_attention_interval") == 0:
        yield from _attention(shape, layer)
    else:
        yield "attn_norm_2.weight", (inner,)
        yield "attn_qkv.weight", (width, 3 * inner)
        yield "attn_gate.weight", (width, inner)
        yield "attn_output.weight", (inner, width)
    yield from _experts(shape)


def _gemma3n(shape: Shape, layer: int) -> Tensors:
    width = shape.get("embedding_length")
    yield from _plain(shape, layer)
    yield from _norms(shape, "post_norm", "altup_correct_scale", "altup_router_norm", "laurel_post_norm")
    yield "inp_gate.weight", (width, _ALTUP_WIDTH)
    yield "proj.weight", (_ALTUP_WIDTH, width)
    yield "altup_correct_coef.weight", (_ALTUPS, _ALTUPS)
    yield "altup_predict_coef.weight", (_ALTUPS, _ALTUPS * _ALTUPS)
    yield "altup_router.weight", (width, _ALTUPS)
    yield "laurel_l.weight", (width, _LAUREL_RANK)
    yield "laurel_r.weight", (_LAUREL_RANK, width)


def _gemma4(shape: Shape, layer: int) -> Tensors:
    """Yield the tensors of a layer. Global layers have longer heads.

    If the KV heads are given by layer, global layers have fewer of them and no V of their own.
    """
    width, heads = shape.get("embedding_length"), shape.get("attention.head_count")
    kv_heads, is_sliding = shape.of_layer("attention.head_count_kv", layer), shape.metadata[_PATTERN][layer]
    length = shape.get("attention.key_length_swa" if is_sliding else "attention.key_length")
    yield from _norms(shape, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    yield "attn_q.weight", (width, heads * length)
    yield "attn_k.weight", (width, kv_heads * length)
    if is_sliding or not isinstance(shape.metadata["attention.head_count_kv"], list):
        yield "attn_v.weight", (width, kv_heads * length)
    yield "attn_output.weight", (heads * length, width)
    yield "attn_q_norm.weight", (length,)
    yield "attn_k_norm.weight", (length,)
    yield "layer_output_scale.weight", (1,)
    yield from _dense(shape, layer)
    if shape.get("expert_count"):
        yield from _experts(shape)
        yield from _norms(shape, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    if inputs := shape.get("embedding_length_per_layer_input"):
        yield "inp_gate.weight", (width, inputs)
        yield "proj.weight", (inputs, width)
        yield from _norms(shape, "post_norm")


def _beside_gemma4(shape: Shape) -> Tensors:
    if inputs := shape.get("embedding_length_per_layer_input"):
        yield "per_layer_token_embd.weight", (inputs * shape.layers, shape.vocabulary)
        yield "per_layer_model_proj.weight", (shape.get("embedding_length"), inputs * shape.layers)
        yield "per_layer_proj_norm.weight", (inputs,)


def _beside_gemma3n(shape: Shape) -> Tensors:
    width, inputs = shape.get("embedding_length"), _ALTUP_WIDTH * shape.layers
    yield "altup_proj.weight", (width, width, _ALTUPS - 1)
    yield "altup_unembd_proj.weight", (width, width, _ALTUPS - 1)
    yield "per_layer_token_embd.weight", (inputs, shape.vocabulary)
    yield "per_layer_model_proj.weight", (width, inputs)
    yield "per_layer_proj_norm.weight", (_ALTUP_WIDTH,)


def _rwkv7(shape: Shape, layer: int) -> Tensors:
    width, rows = shape.get("embedding_length"), shape.get("feed_forward_length")
    ranks = {
        "w": shape.get("attention.decay_lora_rank"),
        "a": shape.get("attention.iclr_lora_rank"),
        "v": shape.get(f"attention.{'value_residual_mix' if layer else 'iclr'}_lora_rank"),
        "g": shape.get("attention.gate_lora_rank"),
    }
    for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)
    for name, rank in ranks.items():
        if name != "g":
            yield f"time_mix_{name}0.weight", (width,)
        yield f"time_mix_{name}1.weight", (width, rank)
        yield f"time_mix_{name}2.weight", (rank, width)
    yield "time_mix_lerp_fused.weight", (width, 1, 1, 6)
    for name in ("k_k", "k_a", "r_k"):
        yield f"time_mix_{name}.weight", (width,)
    for name in ("key", "value", "receptance", "output"):
        yield f"time_mix_{name}.weight", (width, width)
    yield "channel_mix_lerp_k.weight", (width, 1, 1)
    yield "channel_mix_key.weight", (width, rows)
    yield "channel_mix_value.weight", (rows, width)


def _beside_rwkv7(shape: Shape) -> Tensors:
    for name in ("token_embd_norm.weight", "token_embd_norm.bias", "output_norm.bias"):
        yield name, (shape.get("embedding_length"),)


def _nothing(_: Shape) -> Tensors:
    yield from ()


def _jamba(shape: Shape, layer: int) -> Tensors:
    yield from _norms(shape, "attn_norm", "ffn_norm")
    is_attention = shape.of_layer("attention.head_count_kv", layer)
    yield from _attention(shape, layer) if is_attention else _mamba_1(shape, has_norms=True)
    yield from _dense(shape, layer)


def _falcon_h1(shape: Shape, layer: int) -> Tensors:
    yield from _norms(shape, "attn_norm")
    yield "ffn_norm", (shape.get("embedding_length"),)
    yield from _mamba_2(shape)
    yield from _attention(shape, layer)
    yield from _dense(shape, layer)


def _nemotron(shape: Shape, layer: int) -> Tensors:
    yield from _norms(shape, "attn_norm")
    if shape.of_layer("feed_forward_length", layer):
        yield from (entry for entry in _dense(shape, layer) if not entry[0].startswith("ffn_gate"))
    elif shape.of_layer("attention.head_count_kv", layer):
        yield from _attention(shape, layer)
    else:
        yield from _mamba_2(shape)


def _lfm2(shape: Shape, layer: int) -> Tensors:
    yield from _norms(shape, "attn_norm", "ffn_norm")
    if shape.of_layer("attention.head_count_kv", layer):
        yield from _attention(shape, layer, has_norms=True)
    else:
        yield from _short_convolution(shape)
    yield from _dense(shape, layer)


BLOCKS: dict[str, Callable[[Shape, int], Tensors]] = {
    "cohere2": _cohere,
    "deepseek2": _deepseek,
    "falcon-h1": _falcon_h1,
    "gemma2": _plain,
    "gemma3": _plain,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi-linear": _deepseek,
    "lfm2": _lfm2,
    "llama": _plain,
    "mamba": _mamba,
    "mamba2": _mamba,
    "minimax-01": _minimax,
    "nemotron_h": _nemotron,
    "phi3": _phi3,
    "qwen2moe": _qwen2,
    "qwen2vl": _qwen2,
    "qwen3": _plain,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3moe": _plain,
    "qwen3next": _qwen35,
    "rwkv7": _rwkv7,
    "smallthinker": _plain,
}
BESIDE: dict[str, Callable[[Shape], Tensors]] = {
    "gemma3n": _beside_gemma3n,
    "gemma4": _beside_gemma4,
    "rwkv7": _beside_rwkv7,
}
