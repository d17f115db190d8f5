"""Decides if a cell can exist and which driver it needs. Pure; each refusal names the fact and its source.

The facts are rows of images/facts/nvidia.yaml. A decision not to build a possible cell is no fact: it stands in the
matrix under `out_of_scope`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import Field

from images import rows
from images.errors import BuildError, MatrixError, near_miss
from images.matrix.matrix import Base, Cell, Platform, SmForm, Toolkit, Variants
from images.rows import Names, Row, Source, Text

FACTS_NAME = "images/facts/nvidia.yaml"  # path for messages

Driver = Annotated[str, Field(pattern=r"^\d{3}(?:\.\d+){0,2}$")]
Version = Annotated[str, Field(pattern=r"^\d+\.\d+$")]
ReleaseFact = Literal[
    "targets", "gcc_max", "driver", "minor_floor", "compressed_floor", "glibc_max", "glibc_max_of", "cublas_jit"
]
OPTIONAL_FACTS = frozenset({"glibc_max_of", "cublas_jit"})
SmFact = Literal["chip", "platforms", "first_driver", "tegra"]


class Release(Row):
    """One CUDA release. `driver` was shipped with it and runs its PTX; `minor_floor` runs its machine code."""

    cuda: Version
    targets: tuple[str, ...]
    arch_specific: tuple[str, ...]
    family: tuple[str, ...]
    gcc_max: int
    driver: Driver
    minor_floor: Driver
    compressed_floor: Driver | None
    glibc_max: Version | None
    glibc_max_of: Mapping[Platform, Version] = {}  # lower, and no patch of ours helps
    cublas_jit: Annotated[str, Field(pattern=r"^libnvrtc\.so\.\d+$")] | None = None
    sources: dict[ReleaseFact, Names]

    @property
    def jit_libraries(self) -> tuple[str, ...]:
        """Libraries that cuBLAS opens, directly or through another."""
        return (self.cublas_jit, f"libnvrtc-builtins.so.{self.cuda}") if self.cublas_jit else ()

    @property
    def forms(self) -> tuple[str, ...]:
        """Every value that `code=sm_…` may have."""
        return (*self.targets, *(f"{sm}a" for sm in self.arch_specific), *(f"{sm}f" for sm in self.family))


class Sm(Row):
    """One chip. `first_driver` is None where its drivers are numbered apart from the toolkits'."""

    sm: Annotated[str, Field(pattern=r"^\d{2,3}$")]
    chip: Text
    platforms: tuple[Platform, ...]
    first_driver: Driver | None
    tegra: bool
    sources: dict[SmFact, Names]


class Host(Row):
    """One distribution. `gcc`: major versions that it packages, the default first."""

    distribution: Text
    glibc: Version
    gcc: Annotated[tuple[int, ...], Field(min_length=1)]
    python: Version
    sources: Names


class GpuNames(Row):
    sm: str
    source: str
    names: Names


class Older(Row):
    """A generation without images, with its numbers: its GPUs are refused by name."""

    sms: Names
    chip: Text
    source: str


class _FactsFile(Row):
    sources: dict[str, Source]
    releases: tuple[Release, ...]
    sms: tuple[Sm, ...]
    hosts: tuple[Host, ...]
    gpus: tuple[GpuNames, ...]
    older: tuple[Older, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The rows by their keys; releases from the oldest to the newest, chips by their number."""

    sources: Mapping[str, Source]
    releases: Mapping[str, Release]
    sms: Mapping[str, Sm]
    hosts: Mapping[str, Host]
    gpus: tuple[GpuNames, ...]
    older: Mapping[str, str] = field(default_factory=dict)  # number -> generation, of chips that no image is for

    def cite(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(str(self.sources[name]) for name in names)


@dataclass(frozen=True, kw_only=True)
class Floors:
    """The oldest drivers: with machine code alone, and if the driver compiles PTX."""

    sass: str
    ptx: str


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A reason against a cell, in words that end a sentence, with its source."""

    what: str
    sources: tuple[str, ...]


def jit_libraries(cell: Cell) -> tuple[str, ...]:
    """Returns the libraries of NVIDIA's compiler that its cuBLAS opens; none without CUDA."""
    return facts().releases[cell.toolkit.cuda].jit_libraries if cell.toolkit else ()


@functools.cache
def facts() -> Facts:
    """Returns the committed facts. Raises MatrixError if they cannot be read."""
    return parse_facts(rows.load(FACTS_NAME))


def parse_facts(data: object) -> Facts:
    file = rows.check(data, _FactsFile, name=FACTS_NAME)
    rows.refuse_twice("release", (row.cuda for row in file.releases), name=FACTS_NAME)
    rows.refuse_twice("SM", (row.sm for row in file.sms), name=FACTS_NAME)
    rows.refuse_twice("distribution", (row.distribution for row in file.hosts), name=FACTS_NAME)
    rows.refuse_twice("SM", (sm for row in file.older for sm in row.sms), name=FACTS_NAME)
    rows.refuse_twice("GPU name", (plain_name(name) for row in file.gpus for name in row.names), name=FACTS_NAME)
    _check_every_fact_is_cited(file)
    _check_sources(file)
    _check_targets(file)
    return Facts(
        sources=file.sources,
        releases={row.cuda: row for row in sorted(file.releases, key=lambda row: numbers(row.cuda))},
        sms={row.sm: row for row in sorted(file.sms, key=lambda row: int(row.sm))},
        hosts={row.distribution: row for row in file.hosts},
        gpus=file.gpus,
        older={sm: row.chip for row in file.older for sm in row.sms},
    )


def numbers(version: str) -> tuple[int, ...]:
    """Turns `570.124.06` into (570, 124, 6), which compares like versions. Raises ValueError for anything else."""
    return tuple(int(part) for part in version.split("."))


# Of makers, and of what a chip is sold in: `Quadro T2000 with Max-Q Design` is the T2000 Max-Q, `IGX Orin` an Orin.
UNTOLD_WORDS = frozenset(
    (
        "nvidia",
        "geforce",
        "tesla",
        "nvgpu",
        "grid",
        "tegra",
        "igx",
        "drive",
        "gpu",
        "with",
        "design",
        "developer",
        "kit",
    )
)


BRANDS = re.compile(r"(nvidia|geforce|quadro|tesla|titan|grid|jetson)(?=[a-z\d])")


def plain_name(name: str) -> str:
    """Returns a GPU's name without optional words. A Jetson's driver says `Orin (nvgpu)`.

    Letters and digits are parted, so `rtx4090` is `RTX 4090` and `80GB` is `80 GB`; `80G` is the same. So are the
    brands: `GeForceRTX3060`.
    """
    parted = BRANDS.sub(r"\1 ", name.casefold())
    words = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<!\w)(\d+)g\b", r"\1gb", parted))
    return " ".join("mobile" if word == "laptop" else word for word in words if word not in UNTOLD_WORDS)


def floors(release: Release, sm: Sm, *, is_compressed: bool) -> Floors:
    """Returns two driver floors, since minor version compatibility covers machine code and no PTX.

    None is below the chip's first driver. `is_compressed`: True if nvcc had --compress-mode=size or balance, which old
    drivers of the same CUDA cannot unpack.
    """
    known = sm.first_driver or release.minor_floor
    # The numbers behind the branch are those of another product where drivers are numbered apart.
    own = release.driver if sm.first_driver else release.driver.partition(".")[0]
    unpacks = (is_compressed and release.compressed_floor) or release.minor_floor
    return Floors(sass=max(release.minor_floor, known, unpacks, key=numbers), ptx=max(own, known, unpacks, key=numbers))


def cell_floors(cell: Cell, known: Facts | None = None, *, sm: str | None = None) -> Floors | None:
    """Returns the driver floors for one GPU; without `sm` the lowest of all chips, since one condition stands for them.

    None for a cell without CUDA. Raises MatrixError if the facts lack its release or chip.
    """
    if cell.target.cuda is None:
        return None
    known = known or facts()
    release = known.releases.get(cell.target.cuda)
    chips = [known.sms.get(each) for each in ((sm,) if sm else cell.sms)]
    if release is None or not all(chips):
        against = (refusal for each in cell.sms for refusal in _target_refusals(cell.target.cuda, each, None, known))
        raise _refused(cell.id, next(against))
    packed = cell.engine.fatbin_compression is not None
    found = [floors(release, chip, is_compressed=packed) for chip in chips if chip]
    return Floors(
        sass=min((each.sass for each in found), key=numbers), ptx=min((each.ptx for each in found), key=numbers)
    )


def required_driver(cell: Cell, known: Facts | None = None, *, sm: str | None = None) -> str | None:
    """Returns the oldest driver for one GPU of the image, or for any. None for a cell without CUDA.

    An engine from wheels always has something for the driver to compile: kernels in PTX, or Triton's.
    """
    found = cell_floors(cell, known, sm=sm)
    if found is None:
        return None
    return found.sass if cell.engine.is_compiled else found.ptx


def runs_on(form: str, sm: str, known: Facts | None = None) -> bool:
    """True if machine code of a form (`80`, `90a`, `120f`) runs on a chip.

    Plain: same major, equal or higher minor, never from or to a Tegra. `a`: that chip alone. `f`: as plain, since a
    family is a major. CUDA C++ Programming Guide, 6.1.2 and the table of family-specific targets.
    """
    known = known or facts()
    own = form.rstrip("af")
    is_apart = any(number in known.sms and known.sms[number].tegra for number in (own, sm))
    if form.endswith("a") or is_apart:
        return own == sm
    return own[:-1] == sm[:-1] and int(own) <= int(sm)


def python_of(base: Base, known: Facts | None = None) -> str:
    """Returns a base's Python: `3.11`. Raises MatrixError if the facts do not know the distribution."""
    return _host(base, known or facts()).python


def check(cells: Iterable[Cell], known: Facts | None = None) -> None:
    """Raises MatrixError for the first cell that cannot exist."""
    known = known or facts()
    for cell in cells:
        for platform in cell.platforms:
            _check_base(cell, platform)
            if cell.engine.is_compiled:
                _check_variants(cell, platform)
            for refusal in cell_refusals(cell, platform, known):
                raise _refused(cell.id, refusal)


def refuse_unresolved(cell: Cell) -> None:
    """Raises BuildError if the toolkit's image has no digest; `--base` can replace only the other one."""
    image = cell.toolkit.image if cell.toolkit else None
    if image and image.digest is None:
        message = f"cell {cell.id} cannot be built: the image of its CUDA toolkit has no digest yet: {image.image}"
        raise BuildError(
            message, hint="python -m images lock --bases asks a registry; --toolkit-image takes one that is here"
        )


def cell_refusals(cell: Cell, platform: Platform, known: Facts) -> Iterator[Refusal]:
    if cell.target.cuda is None:
        return
    for form in cell.sm_forms:
        if form.is_for(platform):
            yield from refusals(cell.target.cuda, form.sm, platform, form, known)
    if cell.toolkit:
        yield from toolkit_refusals(cell.toolkit, cell.base, platform, known)


def refusals(
    cuda: str, sm: str, platform: Platform | None, form: SmForm | None, known: Facts | None = None
) -> Iterator[Refusal]:
    """Yields the facts against a CUDA release making code for a chip on a platform. None as platform means any."""
    known = known or facts()
    yield from _target_refusals(cuda, sm, platform, known)
    release = known.releases.get(cuda)
    if release and form and sm in release.targets and form.form not in release.forms:
        yield Refusal(what=f"CUDA {cuda} has no form sm_{form.form}", sources=known.cite(release.sources["targets"]))
    if form and form.form.rstrip("af") in known.sms and sm in known.sms and not runs_on(form.form, sm, known):
        what = f"code of the form sm_{form.form} does not run on SM {sm}"
        yield Refusal(what=what, sources=known.cite(("programming-guide",)))


def toolkit_refusals(toolkit: Toolkit, base: Base, platform: Platform, known: Facts) -> Iterator[Refusal]:
    """Yields the facts against a toolkit on this base: its compiler, its C library, its platform."""
    release, host = known.releases[toolkit.cuda], _host(base, known)
    gcc = toolkit.host_compiler or host.gcc[0]
    if gcc not in host.gcc:
        what = f"{host.distribution} has no gcc {gcc}, it has {', '.join(map(str, host.gcc))}"
        yield Refusal(what=what, sources=known.cite(host.sources))
    if gcc > release.gcc_max:
        limit = f"CUDA {release.cuda} takes up to {release.gcc_max}"
        what = f"its host compiler is too new: gcc {gcc} of {host.distribution}, {limit}"
        yield Refusal(what=what, sources=known.cite((*release.sources["gcc_max"], *host.sources)))
    lower = release.glibc_max_of.get(platform)
    if lower is not None and numbers(host.glibc) > numbers(lower):
        what = (
            f"CUDA {release.cuda}'s front end reads the headers of glibc up to {lower} on {platform}, "
            f"{host.distribution} has {host.glibc}"
        )
        yield Refusal(what=what, sources=known.cite((*release.sources["glibc_max_of"], *host.sources)))
    is_newer = release.glibc_max is not None and numbers(host.glibc) > numbers(release.glibc_max)
    if is_newer and not toolkit.glibc_patch:
        limit = f"CUDA {release.cuda}'s headers compile on glibc up to {release.glibc_max}"
        what = f"{limit}, {host.distribution} has {host.glibc}"
        yield Refusal(what=what, sources=known.cite((*release.sources["glibc_max"], *host.sources)))
    if toolkit.base and toolkit.base != base.name:
        what = f"its toolkit is {toolkit.base}'s, whose binaries need that C library, and its base is {base.name}"
        yield Refusal(what=what, sources=known.cite(("debian-packages",)))
    if toolkit.image and platform not in toolkit.image.platforms:
        yield Refusal(what=f"{toolkit.image.image} has no platform {platform}", sources=())


def _target_refusals(cuda: str, sm: str, platform: Platform | None, known: Facts) -> Iterator[Refusal]:
    release, chip = known.releases.get(cuda), known.sms.get(sm)
    if release is None:
        yield Refusal(what=f"CUDA {cuda} is unknown, known are {', '.join(known.releases)}", sources=())
    if chip is None:
        yield Refusal(what=f"SM {sm} is unknown, known are {', '.join(known.sms)}", sources=())
    if release and chip and sm not in release.targets:
        what = f"CUDA {cuda} has no target sm_{sm} ({_when(sm, release, known)})"
        yield Refusal(what=what, sources=known.cite(release.sources["targets"]))
    if chip and platform and platform not in chip.platforms:
        what = f"SM {sm} is {chip.chip}, which is built into {', '.join(chip.platforms)} and not {platform}"
        yield Refusal(what=what, sources=known.cite(chip.sources["platforms"]))


def _when(sm: str, release: Release, known: Facts) -> str:
    having = [cuda for cuda, other in known.releases.items() if sm in other.targets]
    later = [cuda for cuda in having if numbers(cuda) > numbers(release.cuda)]
    return f"first in {later[0]}" if later else f"last in {having[-1]}" if having else "no release has it"


def _refused(cell_id: str, refusal: Refusal) -> MatrixError:
    return MatrixError(f"cell {cell_id} cannot exist: {refusal.what}", hint=f"python -m images explain {cell_id}")


def _host(base: Base, known: Facts) -> Host:
    host = known.hosts.get(base.distribution or "")
    if host is None:
        message = (
            f"base {base.name or base.image} is of a distribution that {FACTS_NAME} does not know: {base.distribution}"
        )
        raise MatrixError(message, hint=near_miss(base.distribution or "", known.hosts) or ", ".join(known.hosts))
    return host


def _check_base(cell: Cell, platform: Platform) -> None:
    if platform not in cell.base.platforms:
        message = f"cell {cell.id} cannot exist: base {cell.base.image} has no platform {platform}"
        raise MatrixError(message, hint=f"it has {', '.join(cell.base.platforms)}")


def _check_variants(cell: Cell, platform: Platform) -> None:
    variants = cell.engine.cpu_variants.get(platform, Variants(offered=(), built=()))
    for name in variants.built:
        if name not in variants.offered:
            message = f"cell {cell.id}: {cell.engine.title} offers no CPU variant for {platform} called: {name}"
            raise MatrixError(message, hint=near_miss(name, variants.offered) or ", ".join(variants.offered))
    # Without the baseline a machine that is older than every built variant finds no backend at all.
    if not variants.offered or variants.offered[0] not in variants.built:
        message = f"cell {cell.id}: the baseline CPU variant for {platform} is not built: {', '.join(variants.built)}"
        raise MatrixError(message, hint=f"add {variants.offered[0]}" if variants.offered else "list cpu_variants")
    for name in set(variants.emulated) - set(variants.built):
        message = f"cell {cell.id}: a CPU variant is emulated and not built: {name}"
        raise MatrixError(message, hint=near_miss(name, variants.built) or ", ".join(variants.built))


def _check_sources(file: _FactsFile) -> None:
    lists = [names for row in file.releases for names in row.sources.values()]
    lists += [names for row in file.sms for names in row.sources.values()] + [row.sources for row in file.hosts]
    lists += [(row.source,) for row in file.gpus] + [(row.source,) for row in file.older]
    rows.refuse_uncited((name for names in lists for name in names), file.sources, name=FACTS_NAME)


def _check_every_fact_is_cited(file: _FactsFile) -> None:
    """Refuses a fact without a source: it is somebody's memory."""
    releases = {
        f"CUDA {row.cuda}": set(get_args(ReleaseFact)) - set(row.sources) - (OPTIONAL_FACTS - row.model_fields_set)
        for row in file.releases
    }
    sms = {f"SM {row.sm}": set(get_args(SmFact)) - set(row.sources) - {"tegra"} for row in file.sms}
    sms |= {f"Tegra {row.sm}": {"tegra"} - set(row.sources) for row in file.sms if row.tegra}
    for row, missing in {**releases, **sms}.items():
        if missing:
            message = f"{FACTS_NAME}: {row} has no source for: {', '.join(sorted(missing))}"
            raise MatrixError(message, hint="name one of `sources`, or add one with what was read, where and when")


def _check_targets(file: _FactsFile) -> None:
    known = {row.sm for row in file.sms}
    for release in file.releases:
        for sm in (*release.arch_specific, *release.family):
            if sm not in release.targets:
                message = (
                    f"{FACTS_NAME}: CUDA {release.cuda} has a suffixed form of a chip that is no target of it: {sm}"
                )
                raise MatrixError(message)
        if numbers(release.driver) < numbers(release.minor_floor):
            message = f"{FACTS_NAME}: CUDA {release.cuda}'s own driver is older than its floor: {release.driver}"
            raise MatrixError(message)
    used = {sm for release in file.releases for sm in release.targets} | {row.sm for row in file.gpus}
    for sm in sorted({sm for row in file.older for sm in row.sms} & known):
        message = f"{FACTS_NAME}: a chip is under sms and under older: {sm}"
        raise MatrixError(message)
    for sm in sorted(used - known):
        message = f"{FACTS_NAME}: a chip has no row under sms: {sm}"
        raise MatrixError(message)
