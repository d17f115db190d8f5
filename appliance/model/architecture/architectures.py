"""What each architecture keeps in its cache, according to the engine's source: data, read by `stack.py`.

From llama.cpp `0c1e57098`, the pinned engine's source: names from `LLM_ARCH_NAMES` in src/llama-arch.cpp, patterns
from `load_arch_hparams` in src/models/<name>.cpp, kinds of memory from `llama_model::create_memory` in
src/llama-model.cpp. A new pin means reading these again. The cache of an architecture that is missing here is not
computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from appliance.values import dataclass

RecurrentRule = Literal["every layer", "no KV heads", "no KV heads and no feed-forward", "interval", "beside attention"]
StateRule = Literal["ssm", "ssm ungrouped", "wkv", "shortconv", "kda", "lightning"]
# "cached": if the header has MLA's lengths, one compressed row is kept, and no V. "expanded": K and V as usual.
LatentRule = Literal["cached", "expanded"]


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """Which layers use a sliding window: all but one of every `period` layers (`load_swa_pattern`), unless the
    header has a pattern."""

    period: int | None  # None: the header must have an array; 0: all attention layers
    dense_first: bool = False  # True if the full-attention layer is the first of its period, else it is the last
    window: int | None = None  # default if the header has none; None: the header needs the key unless `is_optional`
    is_fixed: bool = False  # True if `window` overrides the header's value, unless that is 0
    is_optional: bool = False  # True if no layer slides when the header has no window, or 0
    only_layers: int | None = None  # the pattern applies only to models with this many layers


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    rule: RecurrentRule
    state: StateRule
    interval: int = 0  # default of rule "interval" if the header has none


@dataclass(frozen=True, kw_only=True)
class Architecture:
    sliding: Sliding | None = None
    recurrent: Recurrent | None = None
    latents: LatentRule | None = None
    caches: bool = True  # False for models without a cache, such as embedding and diffusion models
    own_kv_layers: int | None = None  # only this many first layers have a cache, later ones reuse it; None: all
    shares_kv: bool = False  # True if the header gives the number of last layers that reuse a cache
    unsupported: str | None = None  # why its cache is not computed


PLAIN = Architecture()
_BY_WINDOW = Sliding(period=4, is_optional=True)
_BY_ARRAY = Sliding(period=None)
_NO_CACHE = Architecture(caches=False)
_INDEXED = Architecture(unsupported="sparse attention keeps a second cache, for its indexer")
_DRAFTER = Architecture(unsupported="it only drafts for another model, with that model's cache")
_SPEECH = Architecture(unsupported="it makes sound, not text")
_ENCODER_DECODER = Architecture(unsupported="an encoder-decoder model keeps two caches")
_DELTA_NET = Architecture(recurrent=Recurrent(rule="interval", interval=4, state="ssm"))
_MAMBA_2 = Architecture(recurrent=Recurrent(rule="no KV heads", state="ssm"))
_NEMOTRON = Architecture(recurrent=Recurrent(rule="no KV heads and no feed-forward", state="ssm"))
_MLA = Architecture(latents="cached")
_EXPANDED = Architecture(latents="expanded")
_KDA = Architecture(latents="cached", recurrent=Recurrent(rule="no KV heads", state="kda"))
_RWKV = Architecture(recurrent=Recurrent(rule="every layer", state="wkv"))

_SPECIAL: Mapping[str, Architecture] = {
    # Sliding windows
    "afmoe": Architecture(sliding=_BY_WINDOW),
    "cohere2": Architecture(sliding=Sliding(period=4)),
    "cohere2moe": Architecture(sliding=Sliding(period=4, dense_first=True)),
    "exaone4": Architecture(sliding=Sliding(period=4, window=4096, only_layers=64)),
    "exaone-moe": Architecture(sliding=Sliding(period=4)),
    "gemma2": Architecture(sliding=Sliding(period=2, window=4096)),
    "gemma3": Architecture(sliding=Sliding(period=6, is_optional=True)),
    "gemma3n": Architecture(sliding=Sliding(period=5), own_kv_layers=20),
    "gemma4": Architecture(sliding=_BY_ARRAY, shares_kv=True),
    "gpt-oss": Architecture(sliding=Sliding(period=2)),
    "granite_swa": Architecture(sliding=_BY_ARRAY),
    "laguna": Architecture(sliding=Sliding(period=4, dense_first=True, is_optional=True)),
    "llama4": Architecture(sliding=Sliding(period=4, window=8192, is_fixed=True)),
    "maple": Architecture(sliding=_BY_ARRAY),
    "mellum": Architecture(sliding=_BY_WINDOW),
    "mimo2": Architecture(sliding=_BY_ARRAY),
    "muse-glimmer": Architecture(sliding=Sliding(period=4)),
    "olmo2": Architecture(sliding=_BY_WINDOW),
    "plamo3": Architecture(sliding=Sliding(period=8, is_optional=True)),
    "smallthinker": Architecture(
        sliding=Sliding(period=4, dense_first=True, window=4096, is_fixed=True, is_optional=True)
    ),
    "spark2_5": Architecture(sliding=_BY_ARRAY),
    "step35": Architecture(sliding=_BY_ARRAY),
    # Multi-head latent attention
    "deepseek2": _MLA,
    "minicpm3": _EXPANDED,
    "mistral4": _MLA,
    "plm": _EXPANDED,
    # Recurrent states, alone or mixed with attention layers
    "arwkv7": _RWKV,
    "rwkv6": _RWKV,
    "rwkv6qwen2": _RWKV,
    "rwkv7": _RWKV,
    "mamba": Architecture(recurrent=Recurrent(rule="every layer", state="ssm ungrouped")),
    "mamba2": Architecture(recurrent=Recurrent(rule="every layer", state="ssm")),
    "jamba": Architecture(recurrent=Recurrent(rule="no KV heads", state="ssm ungrouped")),
    "falcon-h1": Architecture(recurrent=Recurrent(rule="beside attention", state="ssm")),
    "granitehybrid": _MAMBA_2,
    "plamo2": _MAMBA_2,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen3next": _DELTA_NET,
    "qwen35": _DELTA_NET,
    "qwen35moe": _DELTA_NET,
    "minimax-01": Architecture(recurrent=Recurrent(rule="interval", interval=8, state="lightning")),
    "lfm2": Architecture(
        sliding=Sliding(period=0, is_optional=True), recurrent=Recurrent(rule="no KV heads", state="shortconv")
    ),
    "lfm2moe": Architecture(recurrent=Recurrent(rule="no KV heads", state="shortconv")),
    "bailingmoe3": _KDA,
    "kimi-k3": _KDA,
    "kimi-linear": _KDA,
    # No cache
    **dict.fromkeys(("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "modern-bert"), _NO_CACHE),
    **dict.fromkeys(("dream", "llada", "llada-moe", "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1"), _NO_CACHE),
    # Not computed
    "deepseek32": _INDEXED,
    "deepseek4": Architecture(unsupported="compressed attention keeps several caches of its own sizes"),
    "dflash": _DRAFTER,
    "dots3note": _INDEXED,
    "eagle3": _DRAFTER,
    "gemma4-assistant": _DRAFTER,
    "glm-dsa": _INDEXED,
    "glm5-next": _INDEXED,
    "graniteswitch": Architecture(unsupported="it keeps one more cache, for its adapters"),
    "hrm_text": Architecture(unsupported="its layers run several times, with a cache for each"),
    "hy_v4": _INDEXED,
    "minimax-m3": _INDEXED,
    "nanbeige": Architecture(unsupported="its layers run several times, with a cache for each"),
    "pockettts": _SPEECH,
    "qwen3tts": _SPEECH,
    "qwen4exp": _INDEXED,
    "t5": _ENCODER_DECODER,
    "t5encoder": _ENCODER_DECODER,
    "wavtokenizer-dec": _SPEECH,
}
_PLAIN_NAMES = """
    apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell cogvlm command-r dbrx
    deci deepseek deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone falcon gemma glm4 glm4moe gpt2 gptj gptneox
    granite granitemoe grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais jais2 llama llama-embed
    maincoder minicpm minimax-m2 mistral3 mpt nemotron olmo olmoe openelm orion paddleocr
    pangu-embedded phi2 phi3 phimoe plamo qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact
    seed_oss smollm3 stablelm starcoder starcoder2 talkie xverse
""".split()  # noqa: SIM905 - one word per line would be no easier to read
# LLAMA_ROPE_TYPE_NONE of `llama_model_rope_type` in src/llama-model.cpp
WITHOUT_ROPE = frozenset({
    "arwkv7", "bloom", "glm5-next", "gpt2", "gptj", "jais", "jamba", "jina-bert-v2", "kimi-k3", "kimi-linear", "mamba",
    "mamba2", "mpt", "nemotron_h", "nemotron_h_moe", "refact", "rwkv6", "rwkv6qwen2", "rwkv7", "t5", "t5encoder",
    "wavtokenizer-dec",
})  # fmt: skip
# Diffusion models that are distributed as GGUF: IMG_ARCH_LIST of city96/ComfyUI-GGUF, loader.py, and additions of
# forks.
IMAGE_ARCHITECTURES = frozenset({
    "aura", "cosmos", "flux", "hidream", "hyvid", "hyvideo", "ideogram4", "ltx2", "ltxv", "lumina2", "motif_video",
    "pig", "qwen_image", "qwen_image21", "sd1", "sd3", "sdxl", "wan",
})  # fmt: skip
ARCHITECTURES: Mapping[str, Architecture] = {**dict.fromkeys(_PLAIN_NAMES, PLAIN), **_SPECIAL}
