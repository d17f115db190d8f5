"""Select the files of a repository that make one model: GGUF files by quantization, or one set of safetensors. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

from appliance.errors import ConfigError
from appliance.image_facts import is_projector
from appliance.values import dataclass

# The engines' own downloaders take these if no quantization is named, so the same reference means the same file.
USUAL = ("Q4_K_M", "Q8_0")
_PROJECTORS = ("F16", "BF16", "Q8_0", "F32")  # the usual one of a repository first
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_LABEL = re.compile(
    r"(?:^|(?<=[-_./]))(?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|FP32|MXFP4(?:_MOE)?|NVFP4|TQ\d_\d)(?=$|[-_./])",
    re.IGNORECASE,
)
# Files besides weights that an engine reads from a safetensors folder. No code: trust_remote_code is not supported.
_FOLDER_FILES = re.compile(
    r"(?:[^/]*\.safetensors|[^/]*\.json|[^/]*\.jinja|tokenizer\.model(?:\.v\d+)?|[^/]*\.tiktoken|tiktoken\.model|spiece\.model"
    r"|sentencepiece\.bpe\.model|merges\.txt|vocab\.txt)"
)
_LISTED = 24


@dataclass(frozen=True, kw_only=True)
class GgufSet:
    """One model: a file, or all parts of a split one in order. `label` is the quantization in the file name, in
    capitals."""

    label: str
    paths: tuple[str, ...]
    missing: int = 0  # parts that the names announce but that are not listed


def gguf_sets(paths: Iterable[str]) -> tuple[GgufSet, ...]:
    """Group GGUF files into models, sorted by path. Projectors and importance matrices are left out."""
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
    """Return the quantization in a file name, the last one if there are several; "" if there is none."""
    found = _LABEL.findall(path.rpartition("/")[2].removesuffix(".gguf")) or _LABEL.findall(path.rpartition("/")[0])
    return found[-1].upper() if found else ""


def projector_of(paths: Iterable[str]) -> str | None:
    """Return a repository's projector, preferring F16, which every engine build reads; None if it has none."""
    found = sorted(path for path in paths if is_projector(path) and path.lower().endswith(".gguf"))
    order = {label: rank for rank, label in enumerate(_PROJECTORS)}
    return min(found, key=lambda path: (order.get(label_of(path), len(order)), path), default=None)


def pick(sets: Sequence[GgufSet], quant: str | None, what: str, size_of: Callable[[GgufSet], str]) -> GgufSet:
    """Return the set that is meant. Raises ConfigError with a list of the sets and the nearest name."""
    if not sets:
        message = f"repository has no GGUF file: {what}"
        raise ConfigError(message, hint="name a repository of GGUF files; its name often ends in -GGUF")
    if quant is None:
        usual = [each for label in USUAL for each in sets if each.label == label]
        return (*usual, *sets)[0]
    found = _called(sets, quant.upper())
    if len(found) == 1:
        return found[0]
    listing = "".join(f"\n  {_listed_as(each, sets)}  {size_of(each)}" for each in sets[:_LISTED])
    if found:
        message = f"quantization {quant} matches {len(found)} models in {what}{listing}"
        raise ConfigError(message, hint=f"name the file itself, as in {what}/{found[0].paths[0]}")
    message = f"no such quantization in {what}: {quant}{listing}"
    near = difflib.get_close_matches(quant.upper(), [each.label for each in sets if each.label], 1)
    raise ConfigError(message, hint=f"perhaps you meant {what}:{near[0]}" if near else "name one of these")


def _listed_as(one: GgufSet, sets: Sequence[GgufSet]) -> str:
    """Name the set by its label, or by its file if the label is not unique."""
    is_plain = bool(one.label) and [each.label for each in sets].count(one.label) == 1
    return one.label if is_plain else one.paths[0]


def _called(sets: Sequence[GgufSet], quant: str) -> list[GgufSet]:
    """Find sets by the whole label, else without the UD- prefix, which marks how it was quantized, else by its
    beginning."""
    ways: tuple[Callable[[str], bool], ...] = (
        lambda label: label == quant,
        lambda label: label.removeprefix("UD-") == quant,
        lambda label: label.startswith(quant + "_"),
    )
    found = ([each for each in sets if each.label and is_it(each.label)] for is_it in ways)
    return next((each for each in found if each), [])


def folder_files(paths: Iterable[str]) -> tuple[str, ...]:
    """List the files of a safetensors folder at the top of a repository, config.json first; empty if there is none."""
    found = sorted(path for path in paths if _FOLDER_FILES.fullmatch(path))
    if "config.json" not in found or not any(path.endswith(".safetensors") for path in found):
        return ()
    return ("config.json", *(path for path in found if path != "config.json"))
