"""GPUs by the names of NVIDIA, a user or nvidia-smi: the chip's number, memory and bandwidth. Pure.

Names come from images/facts/nvidia.yaml, and many more with figures from images/facts/gpus.yaml.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from images import rows
from images.errors import UsageError
from images.matrix import compat
from images.matrix.compat import Facts
from images.rows import Row, Source

FACTS_NAME = "images/facts/gpus.yaml"  # path for messages
ASK_SM = "give its SM, which nvidia-smi --query-gpu=compute_cap --format=csv says: --sm NN"
SHORTEST_PART = 3  # least length of a name that stands for the whole: `3090` and `Orin` do, `40` does not
LONGEST_LIST = 8  # names in a hint
VGPU = re.compile(r"-(\d+)[ABCQ]$")  # a share of NVIDIA's vGPU, with its GB
MIG_PROFILE = re.compile(r"^\d+g\.(\d+)gb")

Figure = Annotated[float, Field(gt=0, strict=True)]
Number = Annotated[str, Field(pattern=r"^\d{2,3}$")]


Products = dict[Number, dict[str, tuple[Figure, Figure] | tuple[()]]]


class _Published(Row):
    source: Source
    products: Products


class _File(Row):
    source: Source
    names_source: Source
    names: dict[Number, tuple[str, ...]]
    products: Products
    published: tuple[_Published, ...]
    older: dict[Number, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU. `memory_gib` and `bandwidth_gb_s` (10^9) are None if unknown."""

    name: str
    sm: str
    memory_gib: float | None = None
    bandwidth_gb_s: float | None = None

    @property
    def worth(self) -> float | None:
        """Memory times bandwidth: the size of a model that fits, and the speed of reading it."""
        if self.memory_gib is None or self.bandwidth_gb_s is None:
            return None
        return self.memory_gib * self.bandwidth_gb_s

    def __str__(self) -> str:
        return self.name if self.name == f"SM {self.sm}" else f"{self.name} (SM {self.sm})"


@functools.cache
def _file() -> _File:
    return rows.check(rows.load(FACTS_NAME), _File, name=FACTS_NAME)


@functools.cache
def driver_names() -> Mapping[str, str]:
    """Returns chip numbers by the plain names of NVIDIA's driver. Raises MatrixError if the facts cannot be read."""
    return {compat.plain_name(name): sm for sm, names in _file().names.items() for name in names}


@functools.cache
def products() -> Mapping[str, Gpu]:
    """Returns every product of the committed facts by its plain name. Raises MatrixError if they cannot be read."""
    file = _file()
    older = [Gpu(name=name, sm=sm) for sm, names in file.older.items() for name in names]
    tables = (file.products, *(each.products for each in file.published))  # of one name the last counts
    newer = [
        _product(name, sm, figures)
        for table in tables
        for sm, listed in table.items()
        for name, figures in listed.items()
    ]
    return {compat.plain_name(each.name): each for each in (*older, *newer)}


def parse_gpu(name: str, known: Facts | None = None) -> Gpu:
    """Finds a GPU by name. Of several boards the least figures count.

    Raises UsageError, with near misses, for a name that is not one chip's.
    """
    whole, _, part = name.partition(" MIG ")
    rows = _rows(known or compat.facts())
    wanted = compat.plain_name(whole)
    if wanted not in rows and (share := VGPU.search(whole)):
        # The brand ended before Ada, so its RTX 6000 and 8000 are Turing's.
        gpu = parse_gpu(re.sub(r"(?i)\bGRID (?=RTX)", "Quadro ", whole[: share.start()]), known)
        return replace(gpu, name=name, memory_gib=float(share[1]))
    own = driver_names().get(wanted)
    if own:
        rows = {key: row for key, row in rows.items() if row.sm == own}
    found = _matching(wanted, rows)
    sms = {rows[key].sm for key in found}
    if own and not found:
        return Gpu(name=name, sm=own)
    if len(sms) == 1:
        return _part(replace(_least(_boards(found, rows)), name=name), part)
    if sms:
        which = [str(rows[key]) for key in found]
        more = f" and {len(which) - LONGEST_LIST} more" if len(which) > LONGEST_LIST else ""
        message = f"several GPUs are called that: {name}"
        raise UsageError(message, hint=f"say which: {', '.join(which[:LONGEST_LIST])}{more}")
    if of_driver := _driver_sms(wanted):
        return Gpu(name=name, sm=of_driver)
    message = f"no GPU of {FACTS_NAME} is called that: {name}"
    near = ", ".join(rows[key].name for key in difflib.get_close_matches(wanted, rows))
    raise UsageError(message, hint=f"perhaps you meant {near}; else {ASK_SM}" if near else ASK_SM)


def _driver_sms(wanted: str) -> str | None:
    """Returns the chip of the driver's names with these words: `RTX PRO 500` names laptops and boards alone."""
    words = set(wanted.split())
    sms = {sm for name, sm in driver_names().items() if len(words) > 1 and words <= set(name.split())}
    return sms.pop() if len(sms) == 1 else None


def parse_sm(text: str, known: Facts | None = None) -> Gpu:
    """Parses `90`, or `9.0` in nvidia-smi's form. Raises UsageError for a number that no chip has."""
    known = known or compat.facts()
    sm = text.removeprefix("sm_").replace(".", "")
    if sm not in known.sms and sm not in known.older:
        message = f"no chip of {compat.FACTS_NAME} has that number: {text}"
        hint = f"known are {', '.join(known.sms)}; a newer one needs a release of CUDA that this matrix does not have"
        raise UsageError(message, hint=hint)
    return Gpu(name=f"SM {sm}", sm=sm)


def describe(gpus: Iterable[Gpu]) -> str:
    """Returns names for people, each once."""
    return ", ".join(dict.fromkeys(map(str, gpus)))


def _product(name: str, sm: str, figures: tuple[float, float] | tuple[()]) -> Gpu:
    memory_gib, bandwidth_gb_s = figures or (None, None)
    return Gpu(name=name, sm=sm, memory_gib=memory_gib, bandwidth_gb_s=bandwidth_gb_s)


def _rows(known: Facts) -> Mapping[str, Gpu]:
    listed = {compat.plain_name(name): Gpu(name=name, sm=row.sm) for row in known.gpus for name in row.names}
    found = products()
    return {**listed, **found}


def _part(gpu: Gpu, profile: str) -> Gpu:
    """Returns a share of a GPU such as `1g.5gb`: its memory, and the same share of the bandwidth."""
    size = MIG_PROFILE.search(profile)
    if size is None:
        return gpu
    memory_gib = float(size[1])
    share = memory_gib / gpu.memory_gib if gpu.memory_gib else None
    bandwidth = share and gpu.bandwidth_gb_s and share * gpu.bandwidth_gb_s
    return replace(gpu, memory_gib=memory_gib, bandwidth_gb_s=bandwidth)


def _matching(wanted: str, rows: Mapping[str, Gpu]) -> list[str]:
    """Finds products by name, first by the name itself with its words in any order.

    Else it takes the longest name that begins it (`RTX 4090 Founders Edition`), narrowed by names with all of its words
    (`A100 80GB`). Else names that contain it (`RTX PRO 6000`, `2080 Ti`) or have all of its words (`RTX 1000 Ada`).
    """
    words = set(wanted.split())
    if wanted in rows:
        return [wanted]
    whole = [key for key in rows if words and words <= set(key.split())]
    same = [key for key in whole if set(key.split()) == words]
    if same:
        return same
    longer = [key for key in rows if _starts(wanted, key)]
    if longer:
        longest = max(longer, key=len)
        return [key for key in whole if rows[key].sm == rows[longest].sm] or [longest]
    if len(wanted.replace(" ", "")) < SHORTEST_PART:
        return []
    return [key for key in whole if f" {wanted} " in f" {key} "] or (whole if len(words) > 1 else [])


def _boards(found: list[str], rows: Mapping[str, Gpu]) -> list[Gpu]:
    """Returns the boards of a name that has no figures itself: `RTX 3060 12 GB` and others for `RTX 3060`."""
    if any(rows[key].worth is not None for key in found):
        return [rows[key] for key in found]
    longer = [row for key, row in rows.items() if any(_starts(key, each) for each in found)]
    return [row for row in longer if row.sm == rows[found[0]].sm]


def _least(gpus: list[Gpu]) -> Gpu:
    """Returns the board with the least memory and bandwidth. A laptop's counts only if the name says so."""
    told = [gpu for gpu in gpus if gpu.worth is not None]
    desktop = [gpu for gpu in told if not {"Mobile", "Max-Q", "Embedded"} & set(gpu.name.split())]
    return min(desktop or told or gpus, key=lambda gpu: gpu.worth or 0.0)


def _starts(longer: str, shorter: str) -> bool:
    return f"{longer} ".startswith(f"{shorter} ")
