"""Quantization of a model folder, read from its `quantization_config`: method, blocks, modules left out. Pure.

Keys are those of vLLM 0.33.0's layers/quantization, `from_config` of each method.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from appliance.engines.vllm.planning.model.schemes import Scheme, schemes_of
from appliance.values import dataclass

LIMIT = 1 << 20  # upper bound of any length or count, far above those of published models
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_TOWER = re.compile(r"visual|vision|audio")
_COMPRESSED = "compressed-tensors"
_ALIASES = {"compressed_tensors": _COMPRESSED, "auto-round": "inc"}
_MODELOPT = {
    "NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
    "MIXED": "modelopt_mixed",
}  # all kinds of FP8 are "modelopt"
_LEFT_OUT = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Quantization of a folder. `name` is vLLM's name of the method; None if the weights are not quantized.

    A scale is shared by `group` inputs of a weight, and in block-wise methods also by `rows` outputs. None: a whole row
    shares it, or the config does not say.
    """

    name: str | None = None
    bits: int | None = None
    group: int | None = None
    rows: int | None = None
    kv_type: str | None = None  # KV cache type that the checkpoint has scales for
    kv_problem: str | None = None  # why vLLM would fail on the KV cache part of the config
    left_out: tuple[str, ...] = ()  # modules, or patterns of modules, that are not quantized
    schemes: tuple[Scheme, ...] = ()  # for methods with several; empty: the method has one, or it is unknown

    @property
    def loads_kv_scales(self) -> bool:
        """True for methods with a `KVCacheMethod` for attention layers. vLLM refuses an fp8_e5m2 cache with them."""
        name = self.name or ""
        return name in ("fp8", "quark") or name.startswith("modelopt") or (name == _COMPRESSED and bool(self.kv_type))

    def covers(self, *modules: str, layers: int) -> bool:
        """True if a module with one of these names is quantized in at least one of so many layers."""
        named = [each for each in self.left_out if _names(each, modules) and not _TOWER.search(each)]
        found = [_LAYER.search(each) for each in named]
        return None not in found and len({match[1] for match in found if match}) < layers


def _names(left_out: str, modules: Sequence[str]) -> bool:
    """True if an entry of `left_out` means one of these modules: it contains the name, or it is a part of the name, as
    `attn` of `self_attn`."""
    return any(module in left_out or (left_out and left_out in module) for module in modules)


def quantization_of(
    config: Mapping[str, Any], inner: Mapping[str, Any], *, has_kv_scales: bool = False
) -> Quantization:
    """Read the quantization from config.json and its language part. `has_kv_scales` is True if the weight files contain
    scales for the KV cache."""
    found = next((each for each in _places(config, inner) if isinstance(each, Mapping)), None)
    if found is None:
        return Quantization()
    nested = found.get("quantization")
    if isinstance(nested, Mapping):  # ModelOpt's own file
        found = {**found, **nested}
    groups = [found, *_weights_of_groups(found.get("config_groups"))]
    blocks = [block for each in groups if (block := _block(each))]
    name = _name(found)
    kv_type = _kv_type(found, name)
    return Quantization(
        name=name,
        kv_type=kv_type or ("fp8_e4m3" if has_kv_scales and name else None),
        kv_problem=_kv_problem(found.get("kv_cache_scheme")) if name == _COMPRESSED else None,
        bits=next((bits for each in groups if (bits := _first(each, "bits", "w_bit", "num_bits", most=32))), None),
        group=_common([*(_first(each, "group_size", "q_group_size") for each in groups), *(n for _, n in blocks)]),
        rows=_common(rows for rows, _ in blocks),
        left_out=tuple(_left_out(found)),
        schemes=schemes_of(found, name),
    )


def _places(config: Mapping[str, Any], inner: Mapping[str, Any]) -> Iterator[object]:
    yield config.get("quantization_config")
    yield inner.get("quantization_config")
    yield config.get("compression_config")


def _name(found: Mapping[str, Any]) -> str | None:
    """Return vLLM's name of the method, or None. ModelOpt's algorithms are several methods in vLLM, see
    `override_quantization_method` of modelopt.py."""
    algorithm = str(found.get("quant_algo") or "").upper()
    named = str(found.get("quant_method") or ("modelopt" if algorithm else "")).lower()[:40]
    if named == "modelopt":
        return next((method for word, method in _MODELOPT.items() if word in algorithm), named)
    return _ALIASES.get(named, named) or None


def _kv_type(found: Mapping[str, Any], name: str | None) -> str | None:
    """Return the KV cache type that the config asks for, or None. It is in `kv_cache_scheme` of compressed-tensors and
    ModelOpt, or in ModelOpt's older `kv_cache_quant_algo`.

    Source: utils/torch_utils.py `get_kv_cache_quant_algo_string`, layers/attention/attention.py.
    """
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
        if bits == 8 and name != _COMPRESSED and scheme.get("dynamic") is not False:
            return None
        return {8: "fp8_e4m3", 4: "nvfp4"}.get(bits) if type(bits) is int else None
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme).lower())


def _kv_problem(scheme: object) -> str | None:
    """Return why vLLM would refuse the scheme, by the rules of `validate_kv_cache_scheme` in compressed_tensors.py.
    None if it is accepted."""
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping):
        return "it is no object"
    if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        said = f"type {_short(scheme.get('type'))} with num_bits {_short(scheme.get('num_bits'))}"
        return f"{said}, and only float with 8 is known"
    if scheme.get("strategy") not in ("tensor", "attn_head"):
        return f"strategy {_short(scheme.get('strategy'))}, and only tensor and attn_head are known"
    return None if scheme.get("symmetric") else "it is not symmetric"


def _short(value: object) -> str:
    return repr(value)[:40]


def _weights_of_groups(groups: object) -> list[Mapping[str, Any]]:
    if not isinstance(groups, Mapping):
        return []
    found = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    return [weights for weights in found if isinstance(weights, Mapping)]


def _block(found: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the outputs and inputs that share a scale, or None: `weight_block_size` of fp8, `block_structure` of
    compressed-tensors."""
    block = found.get("weight_block_size") or found.get("block_structure")
    if not isinstance(block, Sequence) or len(block) != 2 or not all(_is_size(size, LIMIT) for size in block):
        return None
    return block[0], block[1]


def _first(found: Mapping[str, Any], *names: str, most: int = LIMIT) -> int | None:
    return next((found[name] for name in names if _is_size(found.get(name), most)), None)


def _is_size(value: object, most: int) -> bool:
    return type(value) is int and 0 < value <= most


def _common(sizes: Iterable[int | None]) -> int | None:
    """Return the least common multiple of the sizes, so that groups of every size stay whole. None without sizes."""
    found = {size for size in sizes if size}
    return min(math.lcm(*found), LIMIT) if found else None


def _left_out(found: Mapping[str, Any]) -> Iterator[str]:
    for name in _LEFT_OUT:
        listed = found.get(name)
        if isinstance(listed, Sequence) and not isinstance(listed, str):
            yield from (each for each in listed if isinstance(each, str))
