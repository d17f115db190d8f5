"""Which files of a repository make one model: GGUF files by quantization, or one set of safetensors. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

from appliance.errors import ConfigError
from appliance.image_facts import is_projector
from appliance.values import dataclass

# What the engines' own downloaders take when no quantization is named, so that the same words mean the same file.
USUAL = ("Q4_K_M", "Q8_0")
_PROJECTORS = ("F16", "BF16", "Q8_0", "F32")  # the usual one of a repository first
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_LABEL = re.compile(
    r"(?:^|(?<=[-_./]))(?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|FP32|MXFP4(?:_MOE)?|NVFP4|TQ\d_\d)(?=$|[-_./])",
    re.IGNORECASE,
)
# Beside weights: what an engine reads of a folder of safetensors. No code: trust_remote_code is not for us.
_FOLDER_FILES = re.compile(
    r"(?:[^/]*\.safetensors|[^/]*\.json|[^/]*\.jinja|tokenizer\.model(?:\.v\d+)?|[^/]*\.tiktoken|tiktoken\.model|spiece\.model"
    r"|sentencepiece\.bpe\.model|merges\.txt|vocab\.txt)"
)
_LISTED = 24


@dataclass(frozen=True, kw_only=True)
class GgufSet:
    """One model: a file, or all parts of a split one, first to last. `label` as the name has it, in capitals."""

    label: str
    paths: tuple[str, ...]
    missing: int = 0  # parts that the names announce and nobody lists


def gguf_sets(paths: Iterable[str]) -> tuple[GgufSet, ...]:
    """Sorted by path; projectors, and the matrices that quantizing was weighted with, are none."""
    groups: dict[str, list[str]] = {}
    for path in sorted(paths):
        name = path.rpartition("/")[2].lower()
        if name.endswith(".gguf") and not is_projector(path) and "imatrix" not in name:
            groups.setdefault(_PART.sub("", path), []).append(path)
    return tuple(_set(whole, parts) for whole, parts in groups.items())


def _set(whole: str, parts: list[str]) -> GgufSet:
    announced = _PART.search(parts[0])
    missing = int(announced[2]) - len(parts) if announced else 0
    return GgufSet(label=label_of(whole), paths=tuple(parts), missing=missing)


def label_of(path: str) -> str:
    """The quantization that a name tells; of several words the last. Empty where it tells none."""
    found = _LABEL.findall(path.rpartition("/")[2].removesuffix(".gguf")) or _LABEL.findall(path.rpartition("/")[0])
    return found[-1].upper() if found else ""


def projector_of(paths: Iterable[str]) -> str | None:
    """The one of those that a repository offers; the half-precision one, which every engine's build reads."""
    found = sorted(path for path in paths if is_projector(path) and path.lower().endswith(".gguf"))
    order = {label: rank for rank, label in enumerate(_PROJECTORS)}
    return min(found, key=lambda path: (order.get(label_of(path), len(order)), path), default=None)


def pick(sets: Sequence[GgufSet], quant: str | None, what: str, size_of: Callable[[GgufSet], str]) -> GgufSet:
    """The set that is meant. Raises ConfigError that lists what there is, with the near miss."""
    if not sets:
        message = f"no GGUF file is in {what}"
        raise ConfigError(message, hint="name a repository of GGUF files, which often ends in -GGUF")
    if quant is None:
        usual = [each for label in USUAL for each in sets if each.label == label]
        return (*usual, *sets)[0]
    found = _called(sets, quant.upper())
    if len(found) == 1:
        return found[0]
    listing = "".join(f"\n  {_listed_as(each, sets)}  {size_of(each)}" for each in sets[:_LISTED])
    if found:
        message = f"quantization {quant} means {len(found)} models in {what}{listing}"
        raise ConfigError(message, hint=f"name the file itself, as in {what}/{found[0].paths[0]}")
    message = f"no such quantization in {what}: {quant}{listing}"
    near = difflib.get_close_matches(quant.upper(), [each.label for each in sets if each.label], 1)
    raise ConfigError(message, hint=f"perhaps you meant {what}:{near[0]}" if near else "name one of these")


def _listed_as(one: GgufSet, sets: Sequence[GgufSet]) -> str:
    """By its file where no label tells it from the others."""
    is_plain = bool(one.label) and [each.label for each in sets].count(one.label) == 1
    return one.label if is_plain else one.paths[0]


def _called(sets: Sequence[GgufSet], quant: str) -> list[GgufSet]:
    """By the whole label; else by it without UD-, which marks how a label was made; else by its beginning."""
    ways: tuple[Callable[[str], bool], ...] = (
        lambda label: label == quant,
        lambda label: label.removeprefix("UD-") == quant,
        lambda label: label.startswith(quant + "_"),
    )
    found = ([each for each in sets if each.label and is_it(each.label)] for is_it in ways)
    return next((each for each in found if each), [])


def folder_files(paths: Iterable[str]) -> tuple[str, ...]:
    """A folder of safetensors at the top of a repository, config.json first; empty where it is none."""
    found = sorted(path for path in paths if _FOLDER_FILES.fullmatch(path))
    if "config.json" not in found or not any(path.endswith(".safetensors") for path in found):
        return ()
    return ("config.json", *(path for path in found if path != "config.json"))
