"""Computation type, kernels and attention backend by compute capability. Pure.

Each choice comes with its reason; a refusal names the alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from appliance.engines.vllm.planning.arguments.engine_args import Pins
from appliance.engines.vllm.planning.model.chips import Chip, methods_for, scheme_chips, weights_kernel
from appliance.engines.vllm.planning.model.schemes import Scheme
from appliance.engines.vllm.planning.model.shape import Shape
from appliance.errors import ConfigError, ModelUnreadableError, NoKernelError
from appliance.image_facts import AttentionBackend, EngineFacts
from appliance.model import Model
from appliance.plan.parts.choice import Choice

# The appliance's names of types, with vLLM's names; OUR_TYPES is the reverse.
ENGINE_TYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
OUR_TYPES = {value: name for name, value in ENGINE_TYPES.items()}
_DTYPES = {"half": "float16", "float": "float32", **{name: name for name in OUR_TYPES}}


def choose_dtype(shape: Shape, chip: Chip, pins: Pins) -> tuple[str, Choice]:
    """Choose the computation type. Raises ConfigError (10) if the user set bfloat16 on a chip that lacks it, or a type
    that the quantization does not support."""
    asked = pins.dtype if pins.dtype != "auto" else None
    if asked is not None:
        found = _DTYPES.get(asked)
        if found is None or (found == "bfloat16" and not chip.has_bfloat16):
            why = f"{chip.name} computes no bfloat16, which begins with SM 80" if found else "no such type"
            message = f"setting engine_arg asks for a type that cannot be used: '{asked}' ({pins.source}): {why}"
            raise ConfigError(message, hint="use --dtype float16, or leave it out")
        if (only := _only_types(shape, chip)) and found not in only:
            message = (
                f"setting engine_arg asks for a type that {shape.quantization.name} has not: '{asked}' ({pins.source})"
            )
            raise ConfigError(message, hint=f"use --dtype {only[0]}, or leave it out")
        return found, Choice(name="dtype", value=found, reason="asked for", source=pins.source)
    if (only := _only_types(shape, chip)) and shape.dtype not in only:
        why = f"the model is {shape.dtype}, and {shape.quantization.name} is computed in {only[0]} alone"
        return only[0], Choice(name="dtype", value=only[0], reason=why, source="model")
    if shape.dtype == "float16" or (shape.dtype == "bfloat16" and chip.has_bfloat16):
        return shape.dtype, Choice(name="dtype", value=shape.dtype, reason="the model's own", source="model")
    why = f"the model is {shape.dtype}"
    if shape.dtype == "bfloat16":
        why += f", which {chip.name} does not compute (SM 80 and newer do): weights are converted while they load"
    else:
        why += "; 16 bits are half the memory"
    return chip.dtype, Choice(name="dtype", value=chip.dtype, reason=why, source="probe")


def _only_types(shape: Shape, chip: Chip) -> tuple[str, ...]:
    """Return the types of activations that the quantization is limited to on this GPU; empty if it has no limit."""
    method = shape.quantization.name
    found = weights_kernel(method, chip.sm) if method and chip.sm is not None else None
    return found.dtypes if found and chip.has_bfloat16 else ()


def check_method(model: Model, shape: Shape, engine: EngineFacts) -> None:
    """Raise ModelUnreadableError (30) if the engine does not know the quantization of the weights or of the KV cache's
    scales."""
    if shape.quantization.kv_problem:
        message = f"model cannot be used: {model.path / 'config.json'}: vLLM refuses its kv_cache_scheme: "
        message += shape.quantization.kv_problem
        raise ModelUnreadableError(message, hint="take another quantization of it, or one without kv_cache_scheme")
    known = [each.name for each in engine.quantizations]
    method = shape.quantization.name
    if method is None:
        return
    if known and method not in known:
        _refuse_method(model, method, engine, known)
    problem = next((each.problem for each in _of_linear(shape) if each.problem), None)
    if problem is not None:
        message = f"model cannot be used: {model.path / 'config.json'}: vLLM refuses its quantization: {problem}"
        raise ModelUnreadableError(message, hint="take another quantization of it, or the model in 16 bits")


def check_tokenizer(model: Model, pins: Pins) -> None:
    """Raise ModelUnreadableError (30) for a folder without any tokenizer. vLLM would fail on it after its imports; it
    never downloads one, since a path is not the name of a repository."""
    if model.tokenizer_files or "--skip-tokenizer-init" in pins.passed:
        return
    message = (
        f"model cannot be used: {model.path}: it has no tokenizer: no tokenizer.json, tokenizer.model, vocab.json, "
        "vocab.txt, tekken.json or tokenizer_config.json"
    )
    raise ModelUnreadableError(
        message, hint="fetch the whole folder again: its copy was interrupted, or left files out"
    )


def tokenizer_choice(model: Model) -> Choice | None:
    """Return a warning if the folder names a tokenizer but has no vocabulary file, else None. It is no error, since a
    few tokenizers need none."""
    if set(model.tokenizer_files) != {"tokenizer_config.json"}:
        return None
    why = (
        "the folder has no vocabulary such as tokenizer.json: vLLM fails at its start unless this tokenizer needs none"
    )
    return Choice(name="tokenizer", value="tokenizer_config.json", reason=why, source="model", is_refusal=True)


def _refuse_method(model: Model, method: str, engine: EngineFacts, known: Sequence[str]) -> NoReturn:
    message = (
        f"model cannot be used: {model.path / 'config.json'}: vLLM {engine.version} does not know its quantization "
        f"method: {method!r}"
    )
    raise ModelUnreadableError(message, hint=f"take the model as one of {', '.join(sorted(known))}, or in 16 bits")


def _of_linear(shape: Shape) -> Iterator[Scheme]:
    """Yield the schemes used by linear layers of attention or the dense feed-forward. Experts are left out, since they
    have kernels of their own."""
    stored = shape.quantization
    names = ("self_attn", "attn", "q_proj", "o_proj"), *([] if shape.experts else [("mlp", "gate_proj", "down_proj")])
    if any(stored.covers(*modules, layers=shape.layers) for modules in names):
        yield from (each for each in stored.schemes if not each.is_of_experts)


def quantization_choice(shape: Shape, chip: Chip, pins: Pins, sms: Sequence[int]) -> Choice | None:
    """Return the choice that names the quantization and its kernels; None for weights without quantization. `sms` are
    those of all GPUs, `chip` is the weakest. Raises NoKernelError (20) if a GPU has no kernel for such weights."""
    method = shape.quantization.name
    if method is None:
        return None
    found = weights_kernel(method, chip.sm) if chip.sm is not None else None
    rows, group = shape.quantization.rows, shape.quantization.group
    group_words = f", blocks of {rows} × {group}" if rows else f", groups of {group}" if group else ""
    if found is None or chip.sm is None:
        why = f"its kernels on {chip.name} are unknown to the planner: vLLM refuses at its start if it has none"
        return Choice(name="quantization", value=method, reason=why + group_words, source="model")
    if chip.sm < found.least_sm:
        message = (
            f"model's weights cannot be used on this GPU: {shape.title} is {method}, which needs SM {found.least_sm}, "
            f"and this is {chip.name} ({found.source})"
        )
        raise NoKernelError(message, hint=f"take the model as one of {', '.join(methods_for(chip.sm))}, or in 16 bits")
    schemes = tuple(dict.fromkeys(each.name for each in _of_linear(shape) if each.name))
    for name in schemes:
        _check_scheme(shape, name, pins, sms)
    least = max((known.least_sm for name in schemes if (known := scheme_chips(name))), default=found.least_sm)
    least = max(least, found.least_sm)
    words = f" ({', '.join(schemes)})" if schemes else ""
    why = f"kernels: {found.kernel}{group_words}{words}; it needs SM {least} and this is {chip.name}"
    return Choice(name="quantization", value=method, reason=why, source="model", detail=found.source)


def _check_scheme(shape: Shape, name: str, pins: Pins, sms: Sequence[int]) -> None:
    known = scheme_chips(name)
    if known is None or (stranger := next((sm for sm in sms if not known.runs_on(sm)), None)) is None:
        return
    if known.unless and known.unless in " ".join(pins.passed).replace("=", " "):
        return
    message = (
        f"model's weights cannot be used on this GPU: {shape.title} is {shape.quantization.name} of the scheme {name}, "
        f"which vLLM computes on {known.describe()}, and this is SM {stranger} ({known.source})"
    )
    others = [each for each in methods_for(stranger) if each != shape.quantization.name]
    hint = f"take the model as one of {', '.join(others)}, or in 16 bits"
    other_way = f'; --engine-arg "{known.unless}" uses other kernels, which are untested' if known.unless else ""
    raise NoKernelError(message, hint=hint + other_way)


def check_attention(shape: Shape, chip: Chip, pins: Pins, engine: EngineFacts) -> None:
    """Raise ConfigError (10) if the user set an attention backend that does not support this GPU or model."""
    asked = pins.attention_backend
    if asked is None or chip.sm is None or not engine.attention:  # the CPU build refuses the flag elsewhere
        return
    found = {each.name: _computes(each, chip.sm, is_mla="mla" in shape.kinds) for each in engine.attention}
    if not found.get(asked.upper()):
        what = f"is not for this model on {chip.name}" if asked.upper() in found else "this engine has not"
        message = f"setting engine_arg holds an attention backend that {what}: '{asked[:40]}' ({pins.source})"
        raise ConfigError(message, hint=f"one of {', '.join(chip.backends)}, or leave it out")


def _computes(backend: AttentionBackend, sm: int, *, is_mla: bool) -> bool:
    return (backend.sms is None or str(sm) in backend.sms) and backend.is_mla in (None, is_mla)


def attention_choice(chip: Chip, kv_type: str, pins: Pins) -> tuple[str | None, Choice]:
    """Return the backend to name by the flag, or None, and the choice to report. The flag is used only if the user
    asked for a backend, or if the chip supports a single one."""
    usual = chip.kv_types.get(ENGINE_TYPES.get(kv_type, kv_type), chip.backends[0])
    if pins.attention_backend:
        found = pins.attention_backend
        return found, Choice(name="attention", value=found, reason="asked for", source=pins.source)
    if chip.passed_over:
        passed = "; ".join(f"{name} is passed over: {why}" for name, why in chip.passed_over.items())
        why = f"the only one on {chip.name}, which is no error; {passed}"
        return usual, Choice(name="attention", value=usual, reason=why, source="probe", detail=chip.source)
    why = f"first of {', '.join(chip.backends)} on {chip.name} that reads a {kv_type} cache, in vLLM's own order"
    return None, Choice(name="attention", value=usual, reason=why, source="probe", detail=chip.source)


def gdn_choice(shape: Shape, chip: Chip, pins: Pins) -> tuple[str | None, Choice | None]:
    """Return the kernels of linear attention to name by the flag, or None, and the choice to report. FlashInfer's
    kernels are avoided, since they are compiled at the first request, which then waits."""
    if shape.linear is None:
        return None, None
    if pins.gdn_backend:
        asked = Choice(name="linear_attention", value=pins.gdn_backend, reason="asked for", source=pins.source)
        return pins.gdn_backend, asked
    if chip.gdn == "flashinfer":
        why = "FlashInfer's kernels would be compiled at the first request; Triton's come with the image's cache"
        return "triton", Choice(name="linear_attention", value="triton", reason=why, source="default")
    why = "no kernels of their own below SM 90: Triton's, compiled at the first request, which takes longer once"
    if chip.sm is None:
        why = "the CPU build's own kernels"
    return None, Choice(name="linear_attention", value=chip.gdn, reason=why, source="probe", detail=chip.source)
