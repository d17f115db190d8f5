"""Facts of a model in a folder: config.json and safetensors files, in the layout of Hugging Face."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from appliance.errors import ModelUnreadableError
from appliance.model.architecture.facts import CALLS_TOOLS, EXPERTS_LIMIT, LAYERS_LIMIT, REASONS, Model
from appliance.model.architecture.stack import Layer, LayerKind, Weights
from appliance.model.formats.config import Config, describe_quantization
from appliance.model.formats.gguf import TEMPLATE_KEPT_BYTES
from appliance.model.formats.safetensors import Stored, check_end, check_json, read_json, read_shards

# Layers of the language model only: an encoder for images or sound has its own.
_LAYER = re.compile(r"^(?!.*(?:visual|vision|image|audio|projector))(?:.*?\.)?(?:layers?|h|blocks?)\.(\d+)\.")
_DRAFT_LAYER = re.compile(r"^(?:model\.)?mtp\.(?:layers\.(\d+)\.)?")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings)\.weight")
_KV_SCALE = re.compile(r"\.(?:[kv]_scale|kv_scale|[kv]_proj\.output_scale)$")
_EXPERTS = re.compile(r"\.experts\.|\.experts_|block_sparse_moe\.experts")
_ADDED = re.compile(r'"added_tokens"\s*:\s*')
_ADDED_BYTES = 2**20  # 256 of them take 60 KiB
# Vocabularies as named by transformers, sentencepiece, tiktoken and mistral-common. tokenizer_config.json alone names a
# tokenizer without a vocabulary, such as one of bytes.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer_config.json",
)  # fmt: skip
_TOKENIZER_PATTERNS = ("*.tiktoken", "tiktoken.model", "tokenizer.model.v*", "tokenization_*.py")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
# one element is one parameter; packed types hold several per element
_PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16"})


def read_folder(folder: Path) -> Model:
    """Read a folder model. Raises ModelUnreadableError unless it is a whole language model."""
    config = Config(folder)
    shards = read_shards(folder)
    # otherwise the engine fails on it after a minute, without naming the file
    check_json(folder / "tokenizer_config.json")
    check_end(folder / "tokenizer.json")
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    trunk = config.number("layers", low=1, high=LAYERS_LIMIT)
    drafts = _drafts(config, tensors, trunk)
    weights = _weights(config, tensors, trunk, drafts)
    stored = config.quantization()
    beside = None if stored else _quantization_beside(folder)
    reason = config.why_unsupported()
    kv_heads, key, value = _lengths(config)
    experts = config.number("experts", default=0, high=EXPERTS_LIMIT)
    stack = _stack(config, weights, trunk, drafts) if reason is None else ()
    by_type = _bytes_by_type(tensors)
    template = _chat_template(folder)
    return Model(
        path=folder,
        parts=tuple(shard.path for shard in shards),
        format="safetensors",
        architecture=config.architecture,
        name=folder.name,
        file_bytes=sum(shard.file_bytes for shard in shards),
        header_bytes=shards[0].header_bytes,
        weights_bytes=sum(tensor.size_bytes for tensor in tensors),
        bytes_by_type=by_type,
        quantization=stored or (describe_quantization(beside) if beside else by_type[0][0]),
        matrices=(),
        layers=trunk + drafts,
        embedding_length=config.number("width", low=1),
        feed_forward_length=config.number("feed_forward", default=0),
        heads=config.number("heads", default=0),
        kv_heads=(kv_heads,) * (trunk + drafts),
        key_length=key,
        value_length=value,
        native_context=config.number("context", low=1),
        vocabulary=config.number("vocabulary", low=1),
        experts=experts,
        experts_used=config.number("experts_used", default=0, high=experts) if experts else 0,
        expert_bytes=sum(weights.expert_bytes),
        output_is_tied=not any("lm_head." in tensor.name for tensor in tensors),
        has_chat_template=template is not None,
        is_embedding_model=(folder / "modules.json").exists(),
        cache_kind="attention" if reason is None else "unsupported",
        cache_reason=reason,
        stack=stack,
        embedding_bytes=weights.embedding_bytes,
        output_bytes=weights.output_bytes,
        parameters=_parameters(tensors),
        calls_tools=bool(template and CALLS_TOOLS.search(template)),
        reasons=bool(template and REASONS.search(template)),
        chat_template=template,
        added_tokens=_added_tokens(folder),
        tokenizer_files=_tokenizer_files(folder),
        draft_bytes=sum(weights.dense_bytes[trunk:]) + sum(weights.expert_bytes[trunk:]),
        has_kv_scales=any(_KV_SCALE.search(tensor.name) for tensor in tensors),
        config={**config.values, **({"quantization_config": beside} if beside else {})},
    )


def _tokenizer_files(folder: Path) -> tuple[str, ...]:
    found = [name for name in _TOKENIZER_FILES if (folder / name).exists()]
    found += [path.name for pattern in _TOKENIZER_PATTERNS for path in folder.glob(pattern)]
    return tuple(sorted(found))


def _lengths(config: Config) -> tuple[int, int, int]:
    """KV heads, key length and value length. For MLA: one row of latent and rotated parts, and no value."""
    heads = config.number("heads", default=0)
    if config.number("latent", default=0):
        return 1, config.number("latent") + config.number("rope_length", default=0), 0
    length = config.number("head_length", default=0)
    length = length or (config.number("width", low=1) // heads if heads else 0)
    return config.number("kv_heads", default=heads), length, length


def _stack(config: Config, weights: Weights, trunk: int, drafts: int) -> tuple[Layer, ...]:
    kv_heads, key, value = _lengths(config)
    if not kv_heads * key:
        config.fail("its layers have no attention: it has no heads")
    slides = [*config.slides(trunk), *[False] * drafts]
    window = config.number("window", default=0) or None
    kinds: list[LayerKind] = ["mla" if not value else "sliding" if slide else "full" for slide in slides]
    return tuple(
        Layer(
            kind=kind,
            k_elements=kv_heads * key,
            v_elements=kv_heads * value,
            window=window if kind == "sliding" else None,
            state_bytes=0,
            dense_bytes=weights.dense_bytes[number],
            expert_bytes=weights.expert_bytes[number],
            is_draft=number >= trunk,
        )
        for number, kind in enumerate(kinds)
    )


def _drafts(config: Config, tensors: Iterable[Stored], trunk: int) -> int:
    """Number of draft layers whose weights exist, after the other layers or below `mtp.`: many copies lack them."""
    announced = config.number("drafts", default=0, high=LAYERS_LIMIT)
    last = trunk - 1
    for tensor in tensors:
        number = _layer_of(tensor.name, trunk)
        # Qwen3-Next has draft layers below `mtp.` that its config.json does not mention.
        if number is not None and number >= trunk + (max(announced, 1) if "mtp." in tensor.name else announced):
            config.fail(f"its weights have layer {number}, but config.json has {trunk} and {announced} draft layers")
        last = max(last, -1 if number is None else number)
    return last + 1 - trunk


def _layer_of(name: str, trunk: int) -> int | None:
    draft = _DRAFT_LAYER.match(name)
    if draft:
        return trunk + int(draft[1] or 0)
    layer = _LAYER.match(name)
    return int(layer[1]) if layer else None


def _weights(config: Config, tensors: Iterable[Stored], trunk: int, drafts: int) -> Weights:
    dense, experts = [0] * (trunk + drafts), [0] * (trunk + drafts)
    sums: defaultdict[str, int] = defaultdict(int)
    for tensor in tensors:
        number = _layer_of(tensor.name, trunk)
        if number is None:
            sums["embedding" if _EMBEDDING.search(tensor.name) else "output"] += tensor.size_bytes
            sums["head"] += tensor.size_bytes if "lm_head." in tensor.name else 0
            continue
        is_routed = _EXPERTS.search(tensor.name) is not None
        (experts if is_routed else dense)[number] += tensor.size_bytes
    empty = [number for number in range(trunk) if not dense[number]]
    if empty:
        config.fail(
            f"its weights lack layer {empty[0]} of {trunk}",
            hint="put all parts of this model, and no others, into the folder",
        )
    return Weights(
        embedding_bytes=sums["embedding"],
        output_bytes=sums["output"] + (0 if sums["head"] else sums["embedding"]),
        dense_bytes=tuple(dense),
        expert_bytes=tuple(experts),
    )


def _bytes_by_type(tensors: Iterable[Stored]) -> tuple[tuple[str, int], ...]:
    sums: defaultdict[str, int] = defaultdict(int)
    for tensor in tensors:
        sums[tensor.dtype] += tensor.size_bytes
    return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _parameters(tensors: Iterable[Stored]) -> int:
    """Number of parameters; 0 if weights are packed, because their shapes do not show it."""
    found = list(tensors)
    if not all(tensor.dtype in _PLAIN_TYPES for tensor in found):
        return 0
    return sum(math.prod(tensor.shape) for tensor in found)


def _quantization_beside(folder: Path) -> dict[str, object] | None:
    """Read ModelOpt's own quantization file, which NVIDIA wrote up to 0.29.

    vLLM reads it if config.json has no quantization (transformers_utils/config.py).
    """
    path = folder / "hf_quant_config.json"
    return read_json(path) if path.exists() else None


def _chat_template(folder: Path) -> str | None:
    """Text of the chat template; several are joined. None if there is none or it is unreadable, which is no error."""
    try:
        found = next((folder / name for name in _TEMPLATES if (folder / name).is_file()), None)
        if found is not None and found.suffix != ".json":
            return _head(found, TEMPLATE_KEPT_BYTES)
        template = read_json(found or folder / "tokenizer_config.json").get("chat_template")
    except (ModelUnreadableError, OSError):
        return None
    if isinstance(template, str | None):
        return template
    named = template if isinstance(template, list) else [template]
    texts = [each.get("template") for each in named if isinstance(each, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str)) or None


def _added_tokens(folder: Path) -> frozenset[str]:
    """Tokens added to the tokenizer's vocabulary, such as `<think>`; empty if neither file lists them.

    tokenizer.json has them before its vocabulary of megabytes; older models have them in tokenizer_config.json.
    """
    found: object = None
    with suppress(OSError, RecursionError, ValueError):
        head = _head(folder / "tokenizer.json", _ADDED_BYTES)
        if begin := _ADDED.search(head):
            found, _ = json.JSONDecoder().raw_decode(head, begin.end())
    if not found:
        with suppress(ModelUnreadableError, OSError):
            found = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    each = found.values() if isinstance(found, Mapping) else found if isinstance(found, list) else ()
    texts = (token.get("content") for token in each if isinstance(token, Mapping))
    return frozenset(text for text in texts if isinstance(text, str))


def _head(path: Path, most_bytes: int) -> str:
    if not path.is_file():  # opening a pipe would block for ever
        raise FileNotFoundError(path)
    with path.open("rb") as file:
        return file.read(most_bytes).decode("utf-8", "replace")
