"""Schemes of linear layers in compressed-tensors and Quark, and configs that vLLM refuses on every GPU. Pure.

Sources, the same in vLLM 0.32.0 and 0.33.0: layers/quantization/compressed_tensors/compressed_tensors.py
`_get_scheme_from_parts`, quark/quark.py `_get_scheme_cls_from_config`, `from_config` of each method; defaults of
compressed-tensors 0.17.0, quantization/quant_args.py. The GPUs that support a scheme are in chips.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from appliance.values import dataclass

_ACTIVATION_FORMATS = frozenset({"naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"})
_PACKED = "pack-quantized"
_WHOLE = ("tensor", "channel")
_GROUPED = ("channel", "group")
_WIDEST = 1 << 7  # bits of a value
# Values that `from_config` of each method accepts; it raises for others.
_AWQ_BITS = (4,)
_GPTQ_BITS = (4, 8)
_INC_BITS = range(2, 9)
_FP8_ACTIVATIONS = ("static", "dynamic")
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Scheme of some linear layers. `name` is the one in chips.yaml. It is None if vLLM does not support the config;
    then `problem` says why."""

    name: str | None = None
    problem: str | None = None
    is_of_experts: bool = False  # True if only experts have this scheme


@dataclass(frozen=True, kw_only=True)
class _Args:
    """Arguments of a quantization, like `QuantizationArgs` of compressed-tensors with its inferred defaults."""

    bits: int
    is_float: bool
    strategy: str
    group: int | None
    is_symmetric: bool
    is_dynamic: bool
    has_mx_scales: bool

    @property
    def is_nvfp4(self) -> bool:
        return (self.strategy, self.bits, self.group) == ("tensor_group", 4, 16) and self.is_float and self.is_symmetric

    @property
    def is_mx(self) -> bool:
        return (self.strategy, self.group) == ("group", 32) and self.is_float and self.is_symmetric


def schemes_of(found: Mapping[str, Any], method: str | None) -> tuple[Scheme, ...]:
    """Return the schemes of a `quantization_config`, one for each of its groups. Empty for methods with a single scheme
    that vLLM accepts."""
    if method == "compressed-tensors":
        return tuple(_compressed(found))
    if method == "quark":
        return tuple(_quark(found))
    problem = _problem(found, method)
    return (Scheme(problem=problem),) if problem else ()


def _compressed(found: Mapping[str, Any]) -> Iterator[Scheme]:
    sparsity = found.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        yield Scheme(problem="it is sparse (sparsity_config), which vLLM no longer reads")
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            continue
        targets = group.get("targets")
        names = [str(each) for each in targets] if isinstance(targets, list) else []
        if len(names) == 1 and names[0].endswith("Attention"):  # a group for the KV cache, which vLLM skips
            continue
        of_experts = bool(names) and all("experts" in name for name in names)
        if group["weights"].get("actorder") in (True, "group", "dynamic"):
            yield Scheme(problem="its activations are in the order of groups (actorder), which vLLM no longer reads")
            continue
        weights, inputs = _args(group["weights"]), _args(group.get("input_activations"))
        stored = group.get("format") or found.get("format")
        if weights is not None:
            name, problem = _scheme(weights, inputs, str(stored), has_output=bool(group.get("output_activations")))
            yield Scheme(name=name, problem=problem, is_of_experts=of_experts)


def _args(found: object) -> _Args | None:
    if not isinstance(found, Mapping):
        return None
    bits, group = found.get("num_bits", 8), found.get("group_size")
    if type(bits) is not int or not 0 < bits <= _WIDEST or type(group) not in (int, type(None)):
        return None
    inferred = "tensor" if group is None else "channel" if group == -1 else "group"
    return _Args(
        bits=bits,
        is_float=str(found.get("type", "int")).lower() == "float",
        strategy=str(found.get("strategy") or inferred).lower(),
        group=group,
        is_symmetric=found.get("symmetric") is not False,
        is_dynamic=bool(found.get("dynamic")),
        has_mx_scales="uint8" in str(found.get("scale_dtype")),
    )


def _scheme(weights: _Args, inputs: _Args | None, stored: str, *, has_output: bool) -> tuple[str | None, str | None]:
    """Return the scheme's name, or None and why vLLM refuses it. Both are None if the scheme is not judged. The rules
    are in vLLM's order."""
    if weights.is_nvfp4:
        if inputs is not None and not inputs.is_nvfp4:
            return None, "its weights are NVFP4 and its activations something else, which vLLM does not take"
        return "NVFP4", None
    if weights.is_mx and weights.bits == 4:
        return "MXFP4", None
    if weights.is_mx and weights.bits == 8 and weights.has_mx_scales:
        return "MXFP8", None
    if inputs is not None and _is_w4a8_fp8(weights, inputs):
        return "W4A8 fp8", None
    if has_output:  # static integer activations on both sides: rare, so not judged
        return None, None
    if stored == _PACKED and _is_static_int(weights) and weights.strategy in _GROUPED:
        if inputs is None:
            return f"W{weights.bits}A16", None
        if not inputs.is_float and inputs.is_symmetric and inputs.is_dynamic and inputs.strategy in ("token", "group"):
            return f"W{weights.bits}A{inputs.bits} int", None
    if stored in _ACTIVATION_FORMATS:
        name = _of_activations(weights, inputs)
        if name is not None:
            return name, None
    return None, f"vLLM has no scheme for weights and activations of this kind in the format {stored[:40]!r}"


def _of_activations(weights: _Args, inputs: _Args | None) -> str | None:
    if weights.is_float:
        is_known = weights.is_symmetric and not weights.is_dynamic and weights.strategy in (*_WHOLE, "block")
        return ("W8A8 fp8" if inputs is not None and inputs.is_float else "W8A16 fp8") if is_known else None
    if inputs is None or inputs.bits != 8 or not _is_static_int(weights) or not weights.is_symmetric:
        return None
    is_by_token = inputs.strategy == "token" and inputs.is_dynamic
    if weights.bits == 8 and weights.strategy in _WHOLE:
        is_by_tensor = inputs.strategy == "tensor" and not inputs.is_dynamic
        return "W8A8 int8" if is_by_token or is_by_tensor else None
    if weights.bits == 4 and weights.strategy in _GROUPED and is_by_token:
        return "W4A8 int8"
    return None


def _is_static_int(weights: _Args) -> bool:
    return not weights.is_float and not weights.is_dynamic


def _is_w4a8_fp8(weights: _Args, inputs: _Args) -> bool:
    """True for W4A8 fp8, as in vLLM's `_is_fp8_w4a8`, which it checks only on SM 90. No later rule matches such
    args."""
    is_4_bit = _is_static_int(weights) and (weights.bits, weights.strategy) == (4, "group") and weights.is_symmetric
    return is_4_bit and inputs.is_float and (inputs.bits, inputs.strategy) == (8, "token") and inputs.is_dynamic


def _quark(found: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yield the scheme of all layers without a rule of their own (`global_quant_config`)."""
    whole = found.get("global_quant_config")
    whole = whole if isinstance(whole, Mapping) else {}
    types = [_quark_type(whole.get(name)) for name in ("weight", "input_tensors")]
    if types == ["int8", "int8"]:
        yield Scheme(name="W8A8 int8")
    elif types == ["fp8_e4m3", "fp8_e4m3"]:
        yield Scheme(name="Quark fp8")


def _quark_type(found: object) -> str:
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    return str(found.get("dtype")) if isinstance(found, Mapping) else ""


def _problem(found: Mapping[str, Any], method: str | None) -> str | None:
    """Return why the method's `from_config` would refuse the config, or None."""
    bits = found.get("w_bit", found.get("bits"))
    if method in ("awq", "auto_awq") and type(bits) is int and bits not in _AWQ_BITS:
        return f"it has {bits} bits, and vLLM reads AWQ of 4"
    if method == "gptq" and (found.get("sym") is False or (type(bits) is int and bits not in _GPTQ_BITS)):
        sign = "asymmetric " if found.get("sym") is False else ""
        return f"it is {sign}GPTQ of {bits} bits, and vLLM reads symmetric of 4 or 8"
    if method == "inc" and type(bits) is int and bits not in _INC_BITS:
        return f"it has {bits} bits, and vLLM reads AutoRound of 2 to 8"
    if method == "fp8":
        return _problem_of_fp8(found)
    algorithm = found.get("quant_algo")  # from ModelOpt's nested `quantization`, which `quantization_of` merged in
    if (method or "").startswith("modelopt") and algorithm and str(algorithm).upper() not in _MODELOPT:
        return f"its quant_algo is {str(algorithm)[:40]!r}, and vLLM knows {', '.join(_MODELOPT)}"
    return None


def _problem_of_fp8(found: Mapping[str, Any]) -> str | None:
    scheme, block = found.get("activation_scheme"), found.get("weight_block_size")
    if scheme is not None and scheme not in _FP8_ACTIVATIONS:
        return f"its activation_scheme is {str(scheme)[:40]!r}, and vLLM knows {' and '.join(_FP8_ACTIVATIONS)}"
    if isinstance(block, list) and len(block) != 2:
        return f"its weight_block_size has {len(block)} dimensions, and vLLM reads 2"
    if block and scheme == "static":
        return "its weights are in blocks and its activation_scheme is static, which vLLM does not take together"
    return None
