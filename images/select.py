"""Which cell a machine should run, and why every other one lost. Pure.

A cell fits when its machine code runs on every GPU and the driver is not older than its floor. Of those that fit, the
one compiled for the nearest chip wins, then the newest CUDA.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from images import compat
from images.compat import Facts
from images.errors import MatrixError, UsageError
from images.matrix import Cell, Matrix, Platform, near_miss

SMI_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
ASK_SM = "give its SM, which nvidia-smi --query-gpu=compute_cap --format=csv says: --sm 90"
NO_DEVICES = "no devices were found"
DEFAULT_ENGINE = "llama"  # serves GGUF, runs everywhere; who has safetensors asks for the other by name


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    sm: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What an image would run on. No GPU at all means the CPU; a driver of None was not told and is not checked."""

    platform: Platform
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None


@dataclass(frozen=True, kw_only=True)
class Loser:
    cell: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    cell: str
    tag: str
    why: str
    runners_up: tuple[Loser, ...]


def choose(matrix: Matrix, machine: Machine, known: Facts | None = None, *, engine: str = DEFAULT_ENGINE) -> Choice:
    """Among the cells of one engine. MatrixError, saying what would help, when none fits."""
    known = known or compat.facts()
    matrix = of_engine(matrix, engine)
    fitting = [cell for cell in matrix.cells if _unfit(cell, machine, known) is None]
    if not fitting:
        raise _nothing_fits(matrix, machine, known)
    best = max(fitting, key=lambda cell: _rank(cell, machine))
    losers = [
        Loser(cell=cell.id, why=_unfit(cell, machine, known) or _beaten(cell, best))
        for cell in sorted(matrix.cells, key=lambda cell: _rank(cell, machine), reverse=True)
        if cell is not best
    ]
    return Choice(cell=best.id, tag=best.tag, why=_praise(best, machine, known), runners_up=tuple(losers))


def of_engine(matrix: Matrix, engine: str) -> Matrix:
    """UsageError, with the near miss, for an engine that the matrix does not have."""
    if engine not in matrix.engines:
        message = f"no such engine: {engine}"
        raise UsageError(message, hint=near_miss(engine, matrix.engines) or f"known are {', '.join(matrix.engines)}")
    return replace(matrix, cells=tuple(cell for cell in matrix.cells if cell.engine.name == engine))


def parse_gpu(name: str, known: Facts | None = None) -> Gpu:
    """A GPU by the name that NVIDIA, a user or nvidia-smi gives it. UsageError, with near misses, for a strange one."""
    known = known or compat.facts()
    wanted = compat.plain_name(name)
    rows = {compat.plain_name(listed): (listed, row.sm) for row in known.gpus for listed in row.names}
    # `RTX 4090 Laptop GPU` is longer than what is listed, `RTX PRO 6000` is shorter, and so is `RTX 4000` in two ways.
    longer = [key for key in rows if _starts(wanted, key)]
    shorter = [key for key in rows if wanted and f" {wanted} " in f" {key} "]
    found = [max(longer, key=len)] if longer else shorter
    sms = {rows[key][1] for key in found}
    if len(sms) == 1:
        return Gpu(name=name, sm=sms.pop())
    if sms:
        which = ", ".join(f"{rows[key][0]} (SM {rows[key][1]})" for key in found)
        message = f"several GPUs are called that: {name}"
        raise UsageError(message, hint=f"say which: {which}")
    message = f"no GPU of {compat.FACTS_NAME} is called that: {name}"
    near = ", ".join(rows[key][0] for key in difflib.get_close_matches(wanted, rows))
    raise UsageError(message, hint=f"perhaps you meant {near}; else {ASK_SM}" if near else ASK_SM)


def parse_sm(text: str, known: Facts | None = None) -> Gpu:
    """`90`, or `9.0` as nvidia-smi writes it. UsageError for a chip that the facts do not have."""
    known = known or compat.facts()
    sm = text.removeprefix("sm_").replace(".", "")
    if sm not in known.sms:
        message = f"no SM of {compat.FACTS_NAME} is called that: {text}"
        names = f"known are {', '.join(known.sms)}, and no image is made for an older one"
        raise UsageError(message, hint=near_miss(sm, known.sms) or names)
    return Gpu(name=f"SM {sm}", sm=sm)


def parse_driver(text: str) -> str:
    """UsageError for something that is no driver version."""
    if not text.isascii() or not text.replace(".", "").isdecimal() or not all(text.split(".")):
        message = f"not a driver version: {text}"
        raise UsageError(message, hint="such as 570.124.06; nvidia-smi --query-gpu=driver_version --format=csv says it")
    return text


def parse_smi(code: int, lines: Sequence[str], platform: Platform, known: Facts | None = None) -> Machine:
    """What nvidia-smi said to SMI_QUERY. Not there at all (127) or no device: a machine without a GPU.

    MatrixError when it failed: a GPU that cannot be asked is not the same as none, and the CPU is no silent substitute.
    """
    said = " ".join(lines).strip()
    if code == 127 or NO_DEVICES in said.casefold():
        return Machine(platform=platform)
    rows = [[field.strip() for field in line.split(",")] for line in lines if line.strip()]
    if code != 0 or any(len(row) != 3 for row in rows) or not rows:
        message = f"nvidia-smi failed with exit {code}: {said or 'it said nothing'}"
        raise MatrixError(message, hint="repair the driver, or say what there is: --driver 580.95.05 --gpu 'RTX 5090'")
    gpus = (_asked(name, capability, known) for name, _, capability in rows)
    return Machine(platform=platform, gpus=tuple(gpus), driver=parse_driver(rows[0][1]))


def _asked(name: str, capability: str, known: Facts | None) -> Gpu:
    """By its number, which an unlisted GPU has too; by its name where an old driver does not tell the number."""
    if not capability.replace(".", "").isdecimal():
        return parse_gpu(name, known)
    return Gpu(name=name, sm=parse_sm(capability, known).sm)


def _starts(longer: str, shorter: str) -> bool:
    return f"{longer} ".startswith(f"{shorter} ")


def _unfit(cell: Cell, machine: Machine, known: Facts) -> str | None:
    """Why this cell cannot serve this machine; None when it can."""
    if machine.platform not in cell.platforms:
        return f"not for {machine.platform}"
    form = cell.sm_form
    if form is None:
        return "would leave the GPU idle" if machine.gpus else None
    if not machine.gpus:
        return "needs a GPU"
    strangers = [gpu for gpu in machine.gpus if not compat.runs_on(form.form, gpu.sm, known)]
    if strangers:
        return f"its code for sm_{form.form} does not run on {_names(strangers)}"
    driver = compat.required_driver(cell, known)
    if driver and machine.driver and compat.numbers(machine.driver) < compat.numbers(driver):
        return f"needs driver {driver}, here is {machine.driver}"
    return None


def _rank(cell: Cell, machine: Machine) -> tuple[bool, bool, int, tuple[int, ...]]:
    """One that can be built first, then the chip that is nearest from below, then the newest CUDA."""
    sm = int(cell.target.sm or 0)
    is_near = all(sm <= int(gpu.sm) for gpu in machine.gpus)
    return (not cell.unresolved, is_near, sm if is_near else -sm, compat.numbers(cell.target.cuda or "0"))


def _beaten(cell: Cell, best: Cell) -> str:
    if cell.unresolved and not best.unresolved:
        return f"cannot be built yet: no digest for {cell.unresolved[0].image}"
    if cell.target.sm != best.target.sm:
        return f"runs too, but is compiled for SM {cell.target.sm}"
    return f"runs too, with an older CUDA: {cell.target.cuda}"


def _praise(best: Cell, machine: Machine, known: Facts) -> str:
    required = compat.required_driver(best, known)
    if required is None or best.sm_form is None:
        return "no GPU was found; it runs on the CPU"
    driver = (
        f"driver {machine.driver} is not older than"
        if machine.driver
        else "the driver was not told and must not be older than"
    )
    return f"its code for sm_{best.sm_form.form} runs on {_names(machine.gpus)}; {driver} {required}"


def _names(gpus: Iterable[Gpu]) -> str:
    return ", ".join(
        dict.fromkeys(gpu.name if gpu.name == f"SM {gpu.sm}" else f"{gpu.name} (SM {gpu.sm})" for gpu in gpus)
    )


def _nothing_fits(matrix: Matrix, machine: Machine, known: Facts) -> MatrixError:
    """The change that helps: another driver, else fewer GPUs, else nothing."""
    where = f"no image fits {_names(machine.gpus) or 'a machine without a GPU'} on {machine.platform}"
    with_any_driver = Machine(platform=machine.platform, gpus=machine.gpus)
    willing = [cell for cell in matrix.cells if _unfit(cell, with_any_driver, known) is None]
    if willing:
        lowest = min((_driver(cell, known) for cell in willing), key=compat.numbers)
        easiest = max(
            (cell for cell in willing if _driver(cell, known) == lowest), key=lambda cell: _rank(cell, machine)
        )
        message = f"{where}: the driver is too old: {machine.driver}"
        return MatrixError(message, hint=f"driver {lowest} or newer would do, for {easiest.id}")
    kept = _largest_part(matrix, machine, known) or _largest_part(matrix, with_any_driver, known)
    if kept:
        cell, part = kept
        left = [gpu for gpu in machine.gpus if gpu.sm not in {each.sm for each in part}]
        message = f"{where}: no machine code runs on all of them"
        also = "" if _unfit(cell, Machine(**{**vars(machine), "gpus": part}), known) is None else " with a newer driver"
        return MatrixError(message, hint=f"leave out {_names(left)}: {cell.id} runs on {_names(part)}{also}")
    return MatrixError(where, hint=_elsewhere(matrix, machine, known) or _built(matrix, machine))


def _elsewhere(matrix: Matrix, machine: Machine, known: Facts) -> str | None:
    """Somebody asks on a laptop for the board on the shelf: the same GPUs in the other kind of machine."""
    for platform in get_args(Platform) if machine.gpus else ():
        moved = replace(machine, platform=platform)
        fitting = [cell for cell in matrix.cells if _unfit(cell, moved, known) is None]
        if fitting:
            best = max(fitting, key=lambda cell: _rank(cell, moved))
            return f"{best.id} does in a machine of {platform}: --platform {platform}"
    return None


def _built(matrix: Matrix, machine: Machine) -> str | None:
    cells = [cell for cell in matrix.cells if machine.platform in cell.platforms]
    sms = sorted({cell.target.sm for cell in cells if cell.target.sm}, key=int)
    need = "are for" if machine.gpus else "need a GPU of"
    return f"images for {machine.platform} {need} SM {', '.join(sms)}" if sms else None


def _driver(cell: Cell, known: Facts) -> str:
    return compat.required_driver(cell, known) or "0"


def _largest_part(matrix: Matrix, machine: Machine, known: Facts) -> tuple[Cell, tuple[Gpu, ...]] | None:
    """The most GPUs that one cell can serve, and that cell; chips are left out, since equal chips fit together."""
    chips = sorted({gpu.sm for gpu in machine.gpus}, key=int)
    parts = [
        tuple(gpu for gpu in machine.gpus if gpu.sm in kept)
        for count in range(1, len(chips))
        for kept in itertools.combinations(chips, count)
    ]
    for part in sorted(parts, key=len, reverse=True):
        smaller = Machine(platform=machine.platform, gpus=part, driver=machine.driver)
        fitting = [cell for cell in matrix.cells if _unfit(cell, smaller, known) is None]
        if fitting:
            return max(fitting, key=lambda cell: _rank(cell, smaller)), part
    return None
