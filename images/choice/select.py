"""Chooses the cell for a machine, and tells why others lost and which GPUs are left out. Pure.

A cell serves a GPU if its machine code runs there and the driver is not older than that GPU needs. Of the cells that
serve the most memory times bandwidth, the one of the nearest chip and of that chip alone wins. Of its toolkits a proven
one comes first, then one not newer than the driver's own CUDA, then the newest. So a proof moves no GPU to another
chip's code. If the memory of a GPU is not known, the newest chip counts most: an unknown card is not a weak one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from images.choice import gpus
from images.choice.gpus import Gpu
from images.choice.proofs import Proofs, Record, State, is_proven
from images.errors import MatrixError, UsageError, near_miss
from images.matrix import compat
from images.matrix.compat import Facts
from images.matrix.matrix import Cell, Matrix, Platform, Scope

DEFAULT_ENGINE = "llama"  # serves GGUF, runs everywhere; who has safetensors asks for the other by name
FIRST_SM = 75  # oldest generation of the matrix, for hints about older GPUs
MIB_PER_GIB = 1024


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    gpu: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine to choose for. Without GPUs the CPU is meant; a driver of None is unknown and not checked."""

    platform: Platform
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    unknown: tuple[LeftOut, ...] = ()  # GPUs that nobody could identify


@dataclass(frozen=True, kw_only=True)
class Loser:
    cell: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    cell: str
    tag: str
    why: str
    state: State
    proof: str  # the same in words
    is_here: bool
    platform: Platform  # platform of the machine that it is for, and that builds it
    command: str  # command that makes the tag exist there
    left_out: tuple[LeftOut, ...]
    runners_up: tuple[Loser, ...]


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """A cell on a machine, with the GPUs that it serves there."""

    cell: Cell
    served: tuple[Gpu, ...]


def choose(
    matrix: Matrix,
    machine: Machine,
    known: Facts | None = None,
    *,
    engine: str = DEFAULT_ENGINE,
    record: Record | None = None,
) -> Choice:
    """Chooses among the cells of one engine. Raises MatrixError, naming a remedy, if none fits."""
    known, record = known or compat.facts(), record or Record()
    proofs = record.proofs
    matrix = of_engine(matrix, engine)
    if machine.unknown and not machine.gpus:
        said = "; ".join(f"{each.gpu}: {each.why}" for each in machine.unknown)
        message = f"no GPU of this machine says what it is: {said}"
        raise MatrixError(message, hint=f"repair the driver, or {gpus.ASK_SM}")
    fits = [fit for fit in (_fit(cell, machine, known) for cell in matrix.cells) if fit]
    if not fits:
        raise _nothing_fits(matrix, machine, known)
    ranked = sorted(fits, key=lambda fit: _rank(fit, machine, known, proofs), reverse=True)
    best, others = ranked[0], ranked[1:]
    unfit = [cell for cell in matrix.cells if cell.id not in {fit.cell.id for fit in fits}]
    losers = [Loser(cell=fit.cell.id, why=_beaten(fit, best, machine, known, proofs)) for fit in others]
    losers += [Loser(cell=cell.id, why=_unfit(cell, machine, known)) for cell in unfit]
    return Choice(
        cell=best.cell.id,
        tag=best.cell.tag,
        why=_praise(best, machine, known),
        state=record.state(best.cell, machine.platform),
        proof=record.describe(best.cell, machine.platform),
        is_here=record.has(best.cell, machine.platform),
        platform=machine.platform,
        command=build_command(best.cell),
        left_out=tuple(_left_out(best, matrix, machine, known)),
        runners_up=tuple(losers),
    )


def build_command(cell: Cell) -> str:
    return f"python3 -m images build --only {cell.id} --base auto"


def of_engine(matrix: Matrix, engine: str) -> Matrix:
    """Raises UsageError, with the near miss, for an engine that the matrix does not have."""
    if engine not in matrix.engines:
        message = f"no such engine: {engine}"
        raise UsageError(message, hint=near_miss(engine, matrix.engines) or f"known are {', '.join(matrix.engines)}")
    return replace(matrix, cells=tuple(cell for cell in matrix.cells if cell.engine.name == engine))


def parse_driver(text: str) -> str:
    """Raises UsageError for something that is no driver version."""
    if not text.isascii() or not text.replace(".", "").isdecimal() or not all(text.split(".")):
        message = f"not a driver version: {text!r}"
        raise UsageError(message, hint="such as 570.124.06; nvidia-smi --query-gpu=driver_version --format=csv says it")
    return text


def _fit(cell: Cell, machine: Machine, known: Facts) -> _Fit | None:
    """Returns the GPUs that the cell serves. None if it serves none of the machine's GPUs, or has no use for them."""
    if machine.platform not in cell.platforms or (cell.target.cuda is None) is bool(machine.gpus):
        return None
    served = tuple(gpu for gpu in machine.gpus if _unserved(cell, gpu, machine, known) is None)
    return _Fit(cell=cell, served=served) if served or not machine.gpus else None


def _unserved(cell: Cell, gpu: Gpu, machine: Machine, known: Facts) -> str | None:
    """Returns why this cell cannot serve this GPU; None if it can."""
    if not any(compat.runs_on(form.form, gpu.sm, known) for form in cell.serving(gpu.sm, machine.platform)):
        return f"its code for sm_{', sm_'.join(cell.forms)} does not run on it"
    driver = _driver(cell, gpu, known)
    if machine.driver and compat.numbers(machine.driver) < compat.numbers(driver):
        return f"needs driver {driver}, here is {machine.driver}"
    return None


def _unfit(cell: Cell, machine: Machine, known: Facts) -> str:
    """Returns why this cell serves nothing of this machine."""
    if machine.platform not in cell.platforms:
        return f"not for {machine.platform}"
    if cell.target.cuda is None:
        return "would leave the GPU idle"
    if not machine.gpus:
        return "needs a GPU"
    drivers = [gpu for gpu in machine.gpus if _runs(cell, gpu, machine, known)]
    if drivers:
        floor = min((_driver(cell, gpu, known) for gpu in drivers), key=compat.numbers)
        return f"needs driver {floor}, here is {machine.driver}"
    return f"its code for sm_{', sm_'.join(cell.forms)} does not run on {gpus.describe(machine.gpus)}"


def _runs(cell: Cell, gpu: Gpu, machine: Machine, known: Facts) -> bool:
    return _unserved(cell, gpu, replace(machine, driver=None), known) is None


def _driver(cell: Cell, gpu: Gpu, known: Facts) -> str:
    """Returns the driver that the image needs on this GPU. A chip's own first driver always counts."""
    sm = gpu.sm if gpu.sm in known.sms else None
    return compat.required_driver(cell, known, sm=sm) or "0"


Rank = tuple[bool, tuple[float, float], int, int, int, bool, bool, tuple[int, ...]]


def _rank(fit: _Fit, machine: Machine, known: Facts, proofs: Proofs) -> Rank:
    """Ranks by: can be built, serves most, fits the chips best; among toolkits proven ones come first."""
    cell = fit.cell
    return (
        not cell.unresolved,
        _worth(fit, machine),
        sum(int(gpu.sm) for gpu in fit.served),
        -sum(_distance(cell, gpu, machine, known) for gpu in fit.served),
        -len(cell.sms) if cell.engine.is_compiled else 0,
        is_proven(proofs, cell=cell.id, platform=machine.platform),
        _is_of_the_driver(fit, machine, known),
        compat.numbers(cell.target.cuda or "0"),
    )


def _worth(fit: _Fit, machine: Machine) -> tuple[float, float]:
    """Returns memory times bandwidth of the served GPUs, then memory.

    Memory alone counts if a bandwidth is unknown. If a memory is unknown, the newest chip counts, then the number of
    GPUs: one missing figure makes the sums of the others meaningless.
    """
    if _untold(machine):
        return max((float(gpu.sm) for gpu in fit.served), default=0.0), float(len(fit.served))
    memory_gib = sum(gpu.memory_gib or 0.0 for gpu in fit.served)
    is_told = all(gpu.worth for gpu in _counting(machine))
    return sum(gpu.worth or 0.0 for gpu in fit.served) if is_told else memory_gib, memory_gib


def _untold(machine: Machine) -> list[Gpu]:
    """Returns usable GPUs of unknown memory."""
    return [gpu for gpu in _counting(machine) if gpu.memory_gib is None]


def _counting(machine: Machine) -> list[Gpu]:
    """Returns the GPUs new enough for the matrix. Older ones, such as a display card, decide nothing."""
    return [gpu for gpu in machine.gpus if int(gpu.sm) >= FIRST_SM]


def _is_of_the_driver(fit: _Fit, machine: Machine, known: Facts) -> bool:
    """True if the driver is CUDA's own or newer: minor version compatibility has a limited feature set."""
    release = known.releases.get(fit.cell.target.cuda or "")
    if release is None or machine.driver is None:
        return True
    is_apart = all(gpu.sm in known.sms and known.sms[gpu.sm].tegra for gpu in fit.served)
    own = release.driver.partition(".")[0] if is_apart else release.driver
    return compat.numbers(machine.driver) >= compat.numbers(own)


def _distance(cell: Cell, gpu: Gpu, machine: Machine, known: Facts) -> int:
    forms = (form.form for form in cell.serving(gpu.sm, machine.platform) if compat.runs_on(form.form, gpu.sm, known))
    return int(gpu.sm) - max(int(form.rstrip("af")) for form in forms)


def _beaten(fit: _Fit, best: _Fit, machine: Machine, known: Facts, proofs: Proofs) -> str:
    """Returns the first property in which it is behind the best."""
    cell, winner = fit.cell, best.cell
    if cell.unresolved and not winner.unresolved:
        return f"cannot be built yet: no digest for {cell.unresolved[0].image}"
    missing = [gpu for gpu in best.served if gpu not in fit.served]
    if missing:
        return f"does not serve {gpus.describe(missing)}: {_unserved(cell, missing[0], machine, known)}"
    if cell.forms != winner.forms:
        return f"runs too, but is compiled for SM {', '.join(cell.sms)}"
    proven = [is_proven(proofs, cell=each.id, platform=machine.platform) for each in (cell, winner)]
    if proven == [False, True]:
        return "runs too, and was never proven"
    if not _is_of_the_driver(fit, machine, known) and _is_of_the_driver(best, machine, known):
        return f"runs too, with a CUDA newer than the driver's own: {cell.target.cuda}"
    return f"runs too, with an older CUDA: {cell.target.cuda}"


def _praise(best: _Fit, machine: Machine, known: Facts) -> str:
    cell = best.cell
    if not best.served:
        return "no GPU was found; it runs on the CPU"
    required = max((_driver(cell, gpu, known) for gpu in best.served), key=compat.numbers)
    driver = (
        f"driver {machine.driver} is not older than"
        if machine.driver
        else "the driver was not told and must not be older than"
    )
    used = [form.form for form in cell.sm_forms if any(compat.runs_on(form.form, gpu.sm, known) for gpu in best.served)]
    code = ", sm_".join(dict.fromkeys(used))
    runs = f"its code for sm_{code} runs on {gpus.describe(best.served)}"
    return f"{runs}; {driver} {required}{_guess(best, machine)}"


def _guess(best: _Fit, machine: Machine) -> str:
    """Returns a note if unknown memory made the newest chip decide between GPUs, else an empty string."""
    untold = _untold(machine)
    if not untold or not any(gpu not in best.served for gpu in _counting(machine)):
        return ""
    return (
        f"; the memory of {gpus.describe(untold)} is not known, so the newest chip decides: "
        "--machine FILE tells it (vram_total_mib)"
    )


def _left_out(best: _Fit, matrix: Matrix, machine: Machine, known: Facts) -> list[LeftOut]:
    left = dict.fromkeys(gpu for gpu in machine.gpus if gpu not in best.served)
    served_not = [LeftOut(gpu=str(gpu), why=_why_left_out(best.cell, gpu, matrix, machine, known)) for gpu in left]
    return [*served_not, *machine.unknown]


def _why_left_out(cell: Cell, gpu: Gpu, matrix: Matrix, machine: Machine, known: Facts) -> str:
    """Returns why a GPU is left out: first what keeps every image from it, then what keeps this one."""
    willing = [each for each in matrix.cells if _runs(each, gpu, machine, known)]
    if not willing:
        return _why_never(matrix, gpu, machine, known) or _unserved(cell, gpu, machine, known) or ""
    floor = min((_driver(each, gpu, known) for each in willing), key=compat.numbers)
    if machine.driver and compat.numbers(machine.driver) < compat.numbers(floor):
        return f"needs driver {floor}, here is {machine.driver}"
    return _unserved(cell, gpu, machine, known) or ""


def _too_old(gpu: Gpu, known: Facts) -> str | None:
    if generation := known.older.get(gpu.sm):
        return f"it is of {generation}, and the matrix begins at SM {FIRST_SM}"
    return None


def _nothing_fits(matrix: Matrix, machine: Machine, known: Facts) -> MatrixError:
    """Returns the error with the change that helps: another driver, another kind of machine, else the reason alone."""
    where = f"no image fits {gpus.describe(machine.gpus) or 'a machine without a GPU'} on {machine.platform}"
    with_any_driver = replace(machine, driver=None)
    willing = [fit for fit in (_fit(cell, with_any_driver, known) for cell in matrix.cells) if fit]
    if willing:
        return _driver_too_old(where, willing, machine, known)
    never = {str(gpu): _why_never(matrix, gpu, machine, known) for gpu in machine.gpus}
    whys = [f"{gpu}: {why}" for gpu, why in never.items() if why]
    message = f"{where}: {'; '.join(whys)}" if whys else where
    # Where the matrix decided against this kind of machine, another kind is no help to who has this one.
    elsewhere = None if whys else _elsewhere(matrix, machine, known)
    return MatrixError(message, hint=elsewhere or _built(matrix, machine))


def _driver_too_old(where: str, willing: list[_Fit], machine: Machine, known: Facts) -> MatrixError:
    floors = [(_driver(fit.cell, gpu, known), fit, gpu) for fit in willing for gpu in fit.served]
    lowest = min((floor for floor, _, _ in floors), key=compat.numbers)
    easiest = [(fit, gpu) for floor, fit, gpu in floors if floor == lowest]
    fit, gpu = max(easiest, key=lambda pair: _rank(pair[0], replace(machine, driver=lowest), known, {}))
    is_tegra = gpu.sm in known.sms and known.sms[gpu.sm].tegra
    newer = f"a JetPack whose driver is {lowest} or newer" if is_tegra else f"driver {lowest} or newer"
    message = f"{where}: the driver is too old: {machine.driver}"
    return MatrixError(message, hint=f"{newer} would do, for {fit.cell.id}")


def _why_never(matrix: Matrix, gpu: Gpu, machine: Machine, known: Facts) -> str | None:
    """Returns the generation, or the matrix's decision about this chip and this kind of machine."""
    if why := _too_old(gpu, known):
        return why
    engines = {cell.engine.name for cell in matrix.cells}
    for scope in matrix.out_of_scope:
        if (
            scope.sm
            and gpu.sm in scope.sm
            and _is_about(scope, machine, engines)
            and _is_all(scope, matrix, gpu, machine)
        ):
            return scope.why
    return None


def _is_about(scope: Scope, machine: Machine, engines: set[str]) -> bool:
    return (scope.engine is None or scope.engine in engines) and (
        scope.platforms is None or machine.platform in scope.platforms
    )


def _is_all(scope: Scope, matrix: Matrix, gpu: Gpu, machine: Machine) -> bool:
    """True if a decision covers every release, or the newest. One about an older release is no reason."""
    releases = {cell.target.cuda for cell in matrix.cells if cell.target.cuda}
    return scope.cuda is None or max(releases, key=compat.numbers) in scope.cuda


def _elsewhere(matrix: Matrix, machine: Machine, known: Facts) -> str | None:
    """Tries the same GPUs in the other kind of machine: people ask on a laptop for a board on the shelf."""
    for platform in get_args(Platform) if machine.gpus else ():
        moved = replace(machine, platform=platform)
        fitting = [fit for fit in (_fit(cell, moved, known) for cell in matrix.cells) if fit]
        if fitting:
            best = max(fitting, key=lambda fit: _rank(fit, moved, known, {}))
            return f"{best.cell.id} does in a machine of {platform}: --platform {platform}"
    return None


def _built(matrix: Matrix, machine: Machine) -> str | None:
    cells = [cell for cell in matrix.cells if machine.platform in cell.platforms]
    sms = sorted({form.sm for cell in cells for form in cell.sm_forms if form.is_for(machine.platform)}, key=int)
    cpu = next((cell for cell in cells if cell.target.cuda is None), None)
    need = "are for" if machine.gpus else "need a GPU of"
    alone = f"; {cpu.tag} runs on the CPU alone" if cpu and machine.gpus else ""
    return f"images for {machine.platform} {need} SM {', '.join(sms)}{alone}" if sms else None
