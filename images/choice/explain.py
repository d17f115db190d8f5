"""Explains why a cell exists, cannot exist or is not built: a solver over facts and decisions. Pure.

There are four kinds of no. A fact speaks against the cell, with its source. The matrix leaves it out, with the reason.
Another cell carries its chip, as a wheel's does. Or nothing speaks against it and nobody listed it. Each names the
nearest cells that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from images.choice.proofs import PROOFS_FILE, Record
from images.choice.select import build_command
from images.errors import UsageError, near_miss
from images.matrix import compat, wheel_facts
from images.matrix.compat import Facts, Release, Sm
from images.matrix.matrix import MATRIX_FILE, Base, Cell, Matrix, Platform, SmForm, Toolkit

CELL_ID = re.compile(r"^(?P<engine>[a-z][a-z0-9]*)-(?:cpu|cu(?P<cuda>[1-9]\d{2})(?P<sms>(?:-sm[1-9]\d{1,2})*))$")
NEAREST = 2

Verdict = Literal["exists", "impossible", "out of scope", "carried", "not listed"]


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A fact or decision against a cell. `sources` are citations; a decision cites the matrix."""

    what: str
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Consequence:
    """A consequence for a cell that exists, with its sources."""

    name: str
    value: str
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Near:
    cell: str
    driver: str | None  # oldest driver that it needs; None: needs no GPU
    platforms: tuple[Platform, ...]
    serves: bool  # True if it runs on the chip of the question


@dataclass(frozen=True, kw_only=True)
class Explanation:
    cell: str
    platform: Platform | None  # None: whichever it has
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    nearest: tuple[Near, ...] = ()
    follows: tuple[Consequence, ...] = ()
    cpu: str | None = None  # the cell for the CPU of such a machine

    @property
    def message(self) -> str:
        """The reasons in one sentence, without a period."""
        why = "; ".join(reason.what for reason in self.reasons)
        place = f" on {self.platform}" if self.platform else ""
        verb = "cannot exist" if self.verdict == "impossible" else "is not built"
        return f"cell {self.cell} {verb}{place}: {why}"

    @property
    def hint(self) -> str | None:
        names = [self._name(near) for near in self.nearest]
        if not names:
            return None
        serves = all(near.serves for near in self.nearest)
        if not serves and self.verdict == "out of scope" and self.cpu:
            return f"no image is for such a GPU; {self.cpu} runs on the machine's CPU alone"
        return f"use {', or '.join(names)}" if serves else f"nothing here runs on it; the nearest: {', '.join(names)}"

    def _name(self, near: Near) -> str:
        if near.cell == self.cell:
            return f"it on {' or '.join(near.platforms)}"
        return f"{near.cell} with driver {near.driver} or newer" if near.driver else near.cell


@dataclass(frozen=True, kw_only=True)
class Question:
    """A cell id taken apart. A platform of None means any. CUDA without an SM means all that a wheel carries."""

    cell: str
    engine: str
    cuda: str | None
    sms: tuple[str, ...]
    platform: Platform | None


def explain(
    cell_id: str,
    matrix: Matrix,
    *,
    platform: Platform | None = None,
    known: Facts | None = None,
    record: Record | None = None,
) -> Explanation:
    """Raises UsageError if `cell_id` has not the form of an id."""
    known = known or compat.facts()
    question = _parse(cell_id, matrix, platform)
    cell = next((cell for cell in matrix.cells if cell.id == cell_id), None)
    if cell and (platform is None or platform in cell.platforms):
        follows = (*_states(cell, platform, record or Record()), *_consequences(cell, matrix, known))
        return Explanation(cell=cell_id, platform=platform, verdict="exists", follows=follows)
    verdict, reasons = _against(question, matrix, known)
    return Explanation(
        cell=cell_id,
        platform=platform,
        verdict=verdict,
        reasons=reasons,
        nearest=nearest(question, matrix, known),
        cpu=_cpu_cell(question, matrix, known),
    )


def _cpu_cell(question: Question, matrix: Matrix, known: Facts) -> str | None:
    """Returns the CPU cell for a kind of machine that has the chips of the question; None if there is none."""
    chips = [set(known.sms[sm].platforms) for sm in question.sms if sm in known.sms]
    having = set.intersection(*chips) if chips else set()
    wanted = {question.platform} if question.platform else having
    return next((cell.id for cell in matrix.cells if not cell.sms and wanted & set(cell.platforms)), None)


def _states(cell: Cell, platform: Platform | None, record: Record) -> Iterator[Consequence]:
    """Yields proven, built or rendered for each platform of the question."""
    for each in (platform,) if platform else cell.platforms:
        yield Consequence(name=f"state on {each}", value=record.describe(cell, each), sources=(str(PROOFS_FILE),))
    if not any(record.has(cell, each) for each in cell.platforms):
        foreign = record.own and record.own not in cell.platforms
        where = f", on a machine of {' or '.join(cell.platforms)}" if foreign else ""
        yield Consequence(name="get it", value=f"{build_command(cell)}{where}", sources=("images/README.md",))


def nearest(question: Question, matrix: Matrix, known: Facts) -> tuple[Near, ...]:
    """Returns cells close to the question: another platform, the same chips, code that runs there, the CPU."""
    is_gpu = question.cuda is not None
    here = [cell for cell in matrix.cells if question.platform is None or question.platform in cell.platforms]
    own = [cell for cell in here if cell.engine.name == question.engine and (is_gpu or not cell.sms)] or here
    serving = [cell for cell in own if is_gpu and cell.sms and _serves(cell, question, known)]
    groups = (
        [cell for cell in matrix.cells if cell.id == question.cell],
        [cell for cell in serving if cell.sms == question.sms],
        serving,
        [cell for cell in own if bool(cell.sms) is is_gpu],
    )
    chosen = next((group for group in groups if group), [])
    order = sorted(chosen, key=lambda cell: (_sm_distance(cell, question), _cuda_distance(cell, question.cuda)))
    return tuple(_near(cell, question, known) for cell in order[:NEAREST])


def _near(cell: Cell, question: Question, known: Facts) -> Near:
    asked = [sm for sm in question.sms if sm in known.sms]
    drivers = [compat.required_driver(cell, known, sm=sm) for sm in (asked if _serves(cell, question, known) else ())]
    needed = max((driver for driver in drivers if driver), key=compat.numbers, default=None)
    driver = needed or compat.required_driver(cell, known)
    return Near(cell=cell.id, driver=driver, platforms=cell.platforms, serves=_serves(cell, question, known))


def _serves(cell: Cell, question: Question, known: Facts) -> bool:
    """True if the cell has every chip of the question, on one of its platforms."""
    platforms = [each for each in cell.platforms if question.platform in (None, each)]
    return all(
        any(compat.runs_on(form.form, sm, known) for platform in platforms for form in cell.serving(sm, platform))
        for sm in question.sms
    )


def _sm_distance(cell: Cell, question: Question) -> tuple[int, int]:
    """Returns the distance to the cell's nearest chip, then its number of chips that were not asked for."""
    apart = [min((abs(int(own) - int(sm)) for own in cell.sms), default=0) for sm in question.sms]
    return sum(apart), len(set(cell.sms) - set(question.sms)) if cell.engine.is_compiled else 0


def _cuda_distance(cell: Cell, cuda: str | None) -> float:
    return abs(float(cell.target.cuda or 0) - float(cuda or 0))


def _parse(cell_id: str, matrix: Matrix, platform: Platform | None) -> Question:
    match = CELL_ID.match(cell_id)
    if match is None:
        ids = [cell.id for cell in matrix.cells]
        message = f"not a cell id: {cell_id}"
        raise UsageError(
            message, hint=near_miss(cell_id, ids) or "such as llama-cu130-sm90: engine, CUDA release, SM; or llama-cpu"
        )
    digits = match["cuda"]
    cuda = f"{digits[:-1]}.{digits[-1]}" if digits else None
    sms = tuple(re.findall(r"\d+", match["sms"] or ""))
    return Question(cell=cell_id, engine=match["engine"], cuda=cuda, sms=sms, platform=platform)


def _against(question: Question, matrix: Matrix, known: Facts) -> tuple[Verdict, tuple[Reason, ...]]:
    """Returns the reasons against a cell. Facts come first: an impossible cell needs no decision."""
    engine = matrix.engines.get(question.engine)
    if engine is None:
        hint = near_miss(question.engine, matrix.engines) or f"known are {', '.join(matrix.engines)}"
        return "impossible", (
            Reason(what=f"there is no engine {question.engine} ({hint})", sources=(str(MATRIX_FILE),)),
        )
    if question.cuda is None:
        if engine.cuda is None or engine.without_cuda:
            return "not listed", (_unlisted(question),)
        what = (
            f"the wheels of {engine.title} {engine.version} are made with CUDA {engine.cuda}, and run on no CPU alone"
        )
        return "impossible", (Reason(what=what, sources=(engine.source.lock_file.as_posix(),)),)
    if engine.is_compiled and not question.sms:
        what = f"{engine.title} is compiled here, for the chips that the id names"
        return "impossible", (Reason(what=what, sources=(f"{MATRIX_FILE}, targets",)),)
    refused = tuple(_refusals(question, question.cuda, matrix, known))
    if refused:
        return "impossible", refused
    if carrier := _carrier(question, matrix):
        what = f"{carrier.id} carries its chips: a wheel is for all of them, so there is one cell for a CUDA release"
        return "carried", (Reason(what=what, sources=(f"{MATRIX_FILE}, cells",)),)
    scoped = tuple(_decisions(question, question.cuda, matrix, known))
    return ("out of scope", scoped) if scoped else ("not listed", (_unlisted(question),))


def _carrier(question: Question, matrix: Matrix) -> Cell | None:
    """Returns the cell from wheels that has every chip of the question, on its platform."""
    for cell in _toolkit_users(matrix, question.engine, question.cuda or ""):
        forms = {form.sm: form for form in cell.sm_forms}
        platforms = (question.platform,) if question.platform else cell.platforms
        chips = [forms[sm] for sm in question.sms if sm in forms]
        is_there = any(
            platform in cell.platforms and all(form.is_for(platform) for form in chips) for platform in platforms
        )
        if not cell.engine.is_compiled and len(chips) == len(question.sms) and is_there:
            return cell
    return None


def _refusals(question: Question, cuda: str, matrix: Matrix, known: Facts) -> Iterator[Reason]:
    engine = matrix.engines[question.engine]
    if engine.cuda and engine.cuda != cuda:
        what = f"the wheels of {engine.title} {engine.version} are made with CUDA {engine.cuda}"
        yield Reason(what=what, sources=(engine.source.lock_file.as_posix(),))
    found = [
        refusal
        for sm in question.sms
        for refusal in compat.refusals(cuda, sm, question.platform, engine.sm_forms.get(sm), known)
    ]
    toolkit = matrix.toolkits.get(cuda)
    for cell in (
        _toolkit_users(matrix, question.engine, cuda)[:1] if toolkit and not found and engine.is_compiled else ()
    ):
        # The base that this release's cells stand on is the one that a new cell would stand on.
        found += (
            compat.toolkit_refusals(toolkit, cell.base, question.platform or cell.platforms[0], known)
            if toolkit
            else ()
        )
    yield from (Reason(what=refusal.what, sources=refusal.sources or (compat.FACTS_NAME,)) for refusal in found)


def _decisions(question: Question, cuda: str, matrix: Matrix, known: Facts) -> Iterator[Reason]:
    where = f"{MATRIX_FILE}, out_of_scope"
    if cuda not in matrix.toolkits:
        built = ", ".join(matrix.toolkits)
        what = f"CUDA {cuda} could make it, and the matrix has no toolkit of that release, but {built}"
        yield Reason(what=what, sources=(f"{MATRIX_FILE}, toolkits",))
        return
    having = [set(known.sms[sm].platforms) for sm in question.sms]
    platforms = (question.platform,) if question.platform else tuple(sorted(set.intersection(*having)))
    whys = [
        {
            scope.why: None
            for sm in question.sms
            for scope in matrix.out_of_scope
            if scope.covers(engine=question.engine, cuda=cuda, sm=sm, platform=platform)
        }
        for platform in platforms
    ]
    if all(whys):  # a decision on one kind of machine says nothing of the other
        yield from (Reason(what=why, sources=(where,)) for why in dict.fromkeys(why for each in whys for why in each))


def _unlisted(question: Question) -> Reason:
    return Reason(what="no fact speaks against it, and the matrix does not list it", sources=(f"{MATRIX_FILE}, cells",))


def _toolkit_users(matrix: Matrix, engine: str, cuda: str) -> list[Cell]:
    return [cell for cell in matrix.cells if cell.engine.name == engine and cell.target.cuda == cuda]


def _consequences(cell: Cell, matrix: Matrix, known: Facts) -> Iterator[Consequence]:
    where = str(MATRIX_FILE)
    yield Consequence(name="tag", value=cell.tag, sources=(where,))
    yield Consequence(name="engine", value=f"{cell.engine.title} {cell.engine.version}", sources=(where,))
    yield Consequence(name="platforms", value=", ".join(cell.platforms), sources=(where,))
    yield Consequence(name="base", value=_describe(cell.base), sources=(where,))
    if cell.engine.is_compiled:
        yield Consequence(name="CPU variants", value=", ".join(cell.cpu_variants), sources=(where,))
    elif cell.sm_forms:
        yield from _wheel_consequences(cell, known)
    else:
        yield from _cpu_wheel_consequences(cell)
    if cell.toolkit and cell.sm_forms:
        yield from _cuda_consequences(cell, cell.toolkit, known)
    for base in cell.unresolved:
        yield Consequence(name="cannot be built yet", value=f"no digest: {base.image}", sources=(where,))


def _cuda_consequences(cell: Cell, toolkit: Toolkit, known: Facts) -> Iterator[Consequence]:
    release, host = known.releases[toolkit.cuda], known.hosts[cell.base.distribution or ""]
    compiler = f"gcc {toolkit.host_compiler or host.gcc[0]}, CUDA {toolkit.cuda} takes up to {release.gcc_max}"
    limit = f"up to {release.glibc_max}" if release.glibc_max else "any that is known"
    patched = f", with {toolkit.glibc_patch}" if toolkit.glibc_patch else ""
    values: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("host compiler", compiler, (*release.sources["gcc_max"], *host.sources)),
        ("glibc", f"{host.glibc}, its headers take {limit}{patched}", release.sources["glibc_max"]),
    )
    yield Consequence(name="toolkit", value=toolkit.source, sources=(f"{MATRIX_FILE}, toolkits",))
    yield from (Consequence(name=name, value=value, sources=known.cite(names)) for name, value, names in values)
    for form in cell.sm_forms:
        chip, of_sm = known.sms[form.sm], _of_sm(cell, form)
        code = f"arch=compute_{form.form},code=sm_{form.form}: {form.why}"
        runs = "; ".join(
            f"{other.sm} ({other.chip})" for other in known.sms.values() if compat.runs_on(form.form, other.sm, known)
        )
        yield Consequence(name=f"code{of_sm}", value=code, sources=(f"{MATRIX_FILE}, sm_forms",))
        yield Consequence(name=f"chip{of_sm}", value=chip.chip, sources=known.cite(chip.sources["chip"]))
        yield Consequence(name=f"runs on{of_sm}", value=runs, sources=known.cite(("programming-guide",)))
        yield from _drivers(cell, form, release, chip, known)


def _of_sm(cell: Cell, form: SmForm) -> str:
    return f" of SM {form.sm}" if len(cell.sm_forms) > 1 else ""


def _wheel_consequences(cell: Cell, known: Facts) -> Iterator[Consequence]:
    """Yields what an engine from wheels brings for each chip and what it compiles on the user's machine."""
    engine, told = cell.engine, wheel_facts.facts(cell.engine.name)
    yield Consequence(name="wheels", value=f"of CUDA {engine.cuda}", sources=(engine.source.lock_file.as_posix(),))
    for jit in told.jits:
        value = f"{jit.compiles}, with {jit.tools}"
        yield Consequence(name=f"compiled by {jit.name}", value=value, sources=told.cite(jit.sources))
    for form in cell.sm_forms:
        yield from _wheel_chip(cell, form, known)


def _cpu_wheel_consequences(cell: Cell) -> Iterator[Consequence]:
    """Yields who built the CPU wheel, and which files PyPI does not have."""
    engine, where = cell.engine, f"{MATRIX_FILE}, engines.{cell.engine.name}.without_cuda"
    lock = engine.source.lock_file.as_posix()
    wheels = f"{engine.source.distribution} {engine.source.release}"
    yield Consequence(name="wheels", value=f"{wheels}, {engine.publisher}", sources=(where, lock))
    for file in engine.index_files:
        value = f"{file.file} of {file.index}; where that cannot be reached: build --wheels DIR"
        yield Consequence(name="not on PyPI", value=value, sources=(where,))


def _wheel_chip(cell: Cell, form: SmForm, known: Facts) -> Iterator[Consequence]:
    engine, chip, of_sm = cell.engine, known.sms[form.sm], _of_sm(cell, form)
    told = wheel_facts.facts(engine.name)
    forms, gaps = f"{MATRIX_FILE}, engines.{engine.name}.sm_forms", f"images/gaps/{cell.id}-sm{form.sm}.yaml"
    place = f" ({', '.join(form.platforms)})" if form.platforms else ""
    yield Consequence(name=f"chip{of_sm}", value=f"{chip.chip}{place}", sources=known.cite(chip.sources["chip"]))
    yield Consequence(name=f"code{of_sm}", value=f"native: partial; {form.why}", sources=(forms, gaps))
    waits = ", ".join(form.ptx) or "nothing"
    yield Consequence(name=f"compiled by the driver{of_sm}", value=waits, sources=(gaps,))
    if row := told.attention_of(form.sm):
        value = f"{', '.join(row.order)}: {row.why}"
        yield Consequence(name=f"attention{of_sm}", value=value, sources=told.cite(row.sources))
    if cell.target.cuda:
        yield from _drivers(cell, form, known.releases[cell.target.cuda], chip, known)


def _drivers(cell: Cell, form: SmForm, release: Release, chip: Sm, known: Facts) -> Iterator[Consequence]:
    floors = compat.cell_floors(cell, known, sm=form.sm)
    if floors is None:
        return
    is_packed = cell.engine.fatbin_compression and release.compressed_floor
    both = (*(release.sources["compressed_floor"] if is_packed else ()), *chip.sources["first_driver"])
    for name, value, own in (
        ("driver, machine code", floors.sass, release.sources["minor_floor"]),
        ("driver, with PTX", floors.ptx, release.sources["driver"]),
    ):
        full = f"{name}{_of_sm(cell, form)}"
        yield Consequence(name=full, value=f"{value} or newer", sources=known.cite((*own, *both)))


def _describe(base: Base) -> str:
    return f"{base.reference} ({base.status})"


def lines(explanation: Explanation) -> list[str]:
    """Returns the answer as lines for people: consequences or refusals, each followed by its sources."""
    items: Iterable[tuple[str, tuple[str, ...]]] = [
        (f"{each.name}: {each.value}", each.sources) for each in explanation.follows
    ] or [(each.what, each.sources) for each in explanation.reasons]
    head = f"{explanation.cell}: {explanation.verdict}"
    return [head, *(line for text, sources in items for line in (text, *(f"    {source}" for source in sources)))]
