"""Step 1: build_matrix.yaml -> tuple[Cell, ...].

Pydantic stands where the bytes enter and nowhere else; what leaves is frozen. A row of `cells` names an engine and a
list of targets, and each pair is one Cell, so a CUDA release or an SM is a row of data.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from images import rows
from images.errors import MatrixError, UsageError, near_miss
from images.matrix import publisher
from images.matrix.engines import ENGINES, EngineFiles, files_of
from images.matrix.publisher import Publisher
from images.rows import Row

MATRIX_FILE = Path("build_matrix.yaml")
LOCKS = Path("images/locks")

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Cuda = Annotated[str, Field(pattern=r"^\d+\.\d$")]  # one digit after the point, or cell ids would be ambiguous
Sm = Annotated[str, Field(pattern=r"^\d{2,3}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Platform = Literal["linux/amd64", "linux/arm64"]
PLATFORMS: tuple[Platform, ...] = get_args(Platform)
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LockForm = Literal["wheels", "wheel", "sdist", "engine", "engine-amd64"]
BaseStatus = Literal["verified", "unverified", "unresolved"]
ToolkitForm = Literal["debian", "image", "wheels"]


Whole = Annotated[int, Field(strict=True)]  # `true` is no number


class _BaseSourceRow(Row):
    repository: str
    path: str
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    date: str | object


class _BaseRow(Row):
    image: str
    digest: Digest | None = None
    status: BaseStatus
    asked: str | object = None  # the day on which a registry gave the digest
    source: _BaseSourceRow | None = None
    platforms: list[Platform]
    distribution: Name | None = None
    suite: Name | None = None


class _SnapshotRow(Row):
    root: Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9._~:/%+-]*[A-Za-z0-9]$")]
    source: _BaseSourceRow


class _ToolkitRow(Row):
    form: ToolkitForm
    release: str
    lock: Name | None = None
    image: Name | None = None
    base: Name | None = None
    host_compiler: Whole | None = None
    glibc_patch: str | None = None


class _SourceRow(Row):
    distribution: Name
    release: str
    lock: Name
    wheels: Mapping[Platform, Sha256] = {}


class _IndexFileRow(Row):
    requirement: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+$")]
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9._+-]+\.whl$")]
    sha256: Sha256
    index: Annotated[str, Field(pattern=r"^https://[A-Za-z0-9._~:/%+-]*[A-Za-z0-9]$")]
    status: Literal["verified", "unverified"]
    source: _BaseSourceRow


class _WithoutCudaRow(Row):
    version: str
    publisher: str
    source: _SourceRow
    index_files: tuple[_IndexFileRow, ...] = ()


class _VariantsRow(Row):
    offered: list[Name]
    built: list[Name]
    emulated: Mapping[Name, Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,=+-]*$")]] = {}


class _SmFormRow(Row):
    form: Annotated[str, Field(pattern=r"^\d{2,3}[af]?$")]
    why: str
    ptx: tuple[str, ...] = ()
    platforms: list[Platform] | None = None


class _EngineRow(Row):
    title: str
    license: str
    version: str
    build: Whole | None = None
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{9,40}$")]
    source: _SourceRow
    backend_lock: Name | None = None
    patches: tuple[str, ...] = ()
    cpu_variants: Mapping[Platform, _VariantsRow] = {}
    sm_forms: Mapping[Sm, _SmFormRow] = {}
    fatbin_compression: Literal["size", "balance"] | None = None
    fast_kv_pairs: tuple[Annotated[str, Field(pattern=r"^[a-z0-9_]+-[a-z0-9_]+$")], ...] = ()
    without_cuda: _WithoutCudaRow | None = None


class _TargetRow(Row):
    cuda: Cuda | None = None
    sm: Sm | Annotated[list[Sm], Field(min_length=2)] | None = None


class _CellRow(Row):
    engine: Name
    targets: Annotated[list[Name], Field(min_length=1)]
    template: Name
    base: Name
    platforms: Annotated[list[Platform], Field(min_length=1)]
    size_budget_mib: Annotated[int, Field(gt=0, strict=True)]


class _ScopeRow(Row):
    engine: Name | None = None
    cuda: list[Cuda] | None = None
    sm: list[Sm] | None = None
    platforms: list[Platform] | None = None
    why: str


class _LockRow(Row):
    form: LockForm


class _PublisherRow(Row):
    source: str | None = None
    url: str | None = None
    vendor: str | None = None


class _MatrixFile(Row):
    bases: dict[Name, _BaseRow]
    snapshot: _SnapshotRow
    toolkits: Mapping[Cuda, _ToolkitRow] = {}
    engines: dict[Name, _EngineRow]
    targets: dict[Name, _TargetRow]
    cells: list[_CellRow]
    out_of_scope: tuple[_ScopeRow, ...] = ()
    devcontainers: Mapping[Name, Name] = {}
    locks: dict[Name, _LockRow]
    publisher: _PublisherRow = _PublisherRow()


@dataclass(frozen=True, kw_only=True)
class Base:
    """An image to build on. Without a digest it is `unresolved`: its cells render, and `build` refuses them."""

    image: str
    digest: str | None
    status: BaseStatus
    platforms: tuple[Platform, ...]
    name: str = ""  # its key in the file
    distribution: str | None = None  # key among the hosts of images/facts; None: only files are taken from it
    suite: str | None = None  # its release in Debian's archive; None likewise

    @property
    def reference(self) -> str:
        """The text after FROM, and the key of a named build context that replaces it."""
        return f"{self.image}@{self.digest}" if self.digest else self.image


@dataclass(frozen=True, kw_only=True)
class Source:
    """The hash-locked source of an engine: its source distribution, or one wheel for each platform."""

    distribution: str
    release: str
    lock: str
    sha256: str | None = None  # name of the source distribution
    wheels: Mapping[Platform, str]  # SHA-256; empty: it is compiled

    @property
    def lock_file(self) -> Path:
        """Path relative to the project."""
        return LOCKS / f"{self.lock}.txt"


@dataclass(frozen=True, kw_only=True)
class IndexFile:
    """A wheel that PyPI does not have: by name and hash, with the index that does."""

    requirement: str  # torch==2.13.0+cpu
    file: str
    sha256: str
    index: str


@dataclass(frozen=True, kw_only=True)
class Variants:
    """CPU variants by name: all of upstream's, the baseline first, and those that are built.

    Of the built ones, those that the emulator can execute have the least CPU that must run them, as qemu's `-cpu` takes
    it.
    """

    offered: tuple[str, ...]
    built: tuple[str, ...]
    emulated: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """The source of nvcc and the CUDA libraries of one release: exactly one of lock, image and base."""

    cuda: str
    form: ToolkitForm
    release: str
    lock: str | None = None
    image: Base | None = None
    base: str | None = None
    host_compiler: int | None = None  # major version of gcc; None: the one that the base installs by default
    glibc_patch: str | None = None  # makes the headers compile on a newer C library than they know

    @property
    def source(self) -> str:
        """A few words for people."""
        if self.form == "wheels":
            return f"cuda-toolkit {self.release} from wheels, images/locks/{self.lock}.txt"
        return f"{self.image.reference}" if self.image else f"nvidia-cuda-toolkit {self.release} of {self.base}"


@dataclass(frozen=True, kw_only=True)
class SmForm:
    """The compiler's target for one chip: `90`, `120a`, `100f`. For wheels, the code that they carry for it."""

    sm: str
    form: str
    why: str
    ptx: tuple[str, ...] = ()  # libraries of the wheel with kernels that the driver must compile for this chip
    platforms: tuple[Platform, ...] | None = None  # platforms on which a wheel serves the chip; None: all of the cell

    def is_for(self, platform: Platform) -> bool:
        return self.platforms is None or platform in self.platforms


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A decision not to build a possible cell. None means any."""

    engine: str | None
    cuda: tuple[str, ...] | None
    sm: tuple[str, ...] | None
    platforms: tuple[Platform, ...] | None
    why: str

    def covers(self, *, engine: str, cuda: str, sm: str, platform: Platform) -> bool:
        return (
            self.engine in (None, engine)
            and (self.cuda is None or cuda in self.cuda)
            and (self.sm is None or sm in self.sm)
            and (self.platforms is None or platform in self.platforms)
        )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine, compiled here or from wheels. Wheels have no patches, no variants and one CUDA release."""

    name: str
    title: str
    license: str
    version: str
    build: int | None  # None: its releases have no such number
    commit: str  # all 40 digits, or as many as its wheel tells; empty: it tells none
    files: EngineFiles
    source: Source
    backend_lock: str | None
    patches: tuple[str, ...]  # applied to the source tree in this order; relative to the project
    cpu_variants: Mapping[Platform, Variants]
    sm_forms: Mapping[str, SmForm]
    cuda: str | None = None  # the release that its wheels are made with; None: it is compiled with whichever is asked
    fatbin_compression: str | None = None  # option of nvcc from CUDA 12.8 on; raises the driver's floor
    fast_kv_pairs: tuple[str, ...] = ()  # `K-V` types whose flash attention is compiled for CUDA; others are converted
    publisher: str | None = None  # publisher of its wheels, if it is not the engine's own project
    index_files: tuple[IndexFile, ...] = ()  # wheels that its lock cannot name
    without_cuda: Engine | None = None  # the engine for machines without a GPU, if it is another release

    def for_target(self, target: Target) -> Engine:
        return self.without_cuda if self.without_cuda and target.cuda is None else self

    @property
    def is_compiled(self) -> bool:
        return not self.source.wheels

    @property
    def commit_short(self) -> str:
        return self.commit[:9]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The second half of a cell id. Without CUDA it is a machine without a GPU; CUDA without SM is all of a wheel."""

    name: str
    cuda: str | None
    sms: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One image of the matrix. Its id is its folder, its tag, its test id and its log prefix."""

    engine: Engine
    target: Target
    template: str
    base: Base
    platforms: tuple[Platform, ...]
    size_budget_mib: int  # files of the finished image, uncompressed
    toolkit: Toolkit | None = None  # None if nothing is compiled: without CUDA, or from wheels
    sm_forms: tuple[SmForm, ...] = ()  # one for each chip; empty exactly where the target has no CUDA

    @property
    def id(self) -> str:
        return f"{self.engine.name}-{self.target.name}"

    @property
    def tag(self) -> str:
        return f"appliance:{self.id}"

    @property
    def sms(self) -> tuple[str, ...]:
        return tuple(form.sm for form in self.sm_forms)

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms of the machine code, each once: some wheels serve 103 with the code of 100."""
        return tuple(dict.fromkeys(form.form for form in self.sm_forms))

    @property
    def gencode(self) -> str | None:
        """Options of nvcc: machine code for the cell's chips and no PTX. None without a compiler."""
        if not self.sm_forms or not self.engine.is_compiled:
            return None
        return " -gencode ".join(f"arch=compute_{form},code=sm_{form}" for form in self.forms)

    def serving(self, sm: str, platform: Platform) -> tuple[SmForm, ...]:
        """Returns the forms that may serve a chip on a platform: the chip's own, or all of them if it has none."""
        here = tuple(form for form in self.sm_forms if form.is_for(platform))
        return tuple(form for form in here if form.sm == sm) or here

    @property
    def unresolved(self) -> tuple[Base, ...]:
        """Images that the cell needs and that have no digest yet."""
        needed = (self.base, self.toolkit.image if self.toolkit else None)
        return tuple(base for base in needed if base and base.digest is None)

    @property
    def cpu_variants(self) -> tuple[str, ...]:
        """The variants of all its platforms; the patched CMake list picks those of the platform that is built."""
        built = (
            variants.built for platform, variants in self.engine.cpu_variants.items() if platform in self.platforms
        )
        return tuple(name for names in built for name in names)

    @property
    def folder(self) -> Path:
        """Folder of the rendered files, relative to the project."""
        return Path("images/rendered") / self.id


@dataclass(frozen=True, kw_only=True)
class Matrix:
    cells: tuple[Cell, ...]
    locks: Mapping[str, LockForm]
    engines: Mapping[str, Engine]
    toolkits: Mapping[str, Toolkit]  # by CUDA release
    out_of_scope: tuple[Scope, ...]
    snapshot: str  # root of the service that keeps every state of Debian's archives
    publisher: Publisher
    devcontainers: Mapping[str, Cell] = field(default_factory=dict)  # by the name of its folder


def load(root: Path) -> Matrix:
    """Reads build_matrix.yaml and its locks, below `root`. Raises MatrixError if they cannot be read."""
    data = rows.load(MATRIX_FILE, root=root)
    return parse_matrix(data, {path.stem: _lock_text(path) for path in sorted((root / LOCKS).glob("*.txt"))})


def load_locks(root: Path) -> dict[str, LockForm]:
    """Return the locks that build_matrix.yaml names. Other rows may already name a release that no lock has yet."""
    file = rows.check(rows.load(MATRIX_FILE, root=root), _MatrixFile, name=MATRIX_FILE)
    return {name: row.form for name, row in file.locks.items()}


def parse_matrix(data: object, locks: Mapping[str, str], files: Mapping[str, EngineFiles] = ENGINES) -> Matrix:
    """Makes the matrix. `data`: YAML as values; `locks`: texts of lock files by name; `files`: rows of engines."""
    file = rows.check(data, _MatrixFile, name=MATRIX_FILE)
    bases = {name: _base(name, row) for name, row in file.bases.items()}
    engines = {name: _engine(name, row, file.locks, locks, files_of(name, files)) for name, row in file.engines.items()}
    targets = {name: _target(name, row) for name, row in file.targets.items()}
    toolkits = {cuda: _toolkit(cuda, row, bases, file.locks, locks) for cuda, row in file.toolkits.items()}
    cells = [cell for row in file.cells for cell in _cells(row, engines, targets, bases, toolkits)]
    hint = "an engine and a target make one cell; take it out of one of the rows"
    rows.refuse_twice("cell", (cell.id for cell in cells), name=MATRIX_FILE, hint=hint)
    scopes = tuple(_scope(row) for row in file.out_of_scope)
    _refuse_contradictions(cells, scopes)
    forms = {name: row.form for name, row in file.locks.items()}
    return Matrix(
        cells=tuple(cells),
        locks=forms,
        engines=engines,
        toolkits=toolkits,
        out_of_scope=scopes,
        snapshot=file.snapshot.root,
        publisher=_publisher(file.publisher),
        devcontainers={name: _cell_of(name, cell_id, cells) for name, cell_id in file.devcontainers.items()},
    )


def _publisher(row: _PublisherRow) -> Publisher:
    try:
        return Publisher(
            source=row.source and publisher.parse_address(row.source),
            url=row.url and publisher.parse_address(row.url),
            vendor=row.vendor and publisher.parse_vendor(row.vendor),
        )
    except UsageError as error:
        message = f"{MATRIX_FILE}: publisher: {error.message}"
        raise MatrixError(message, hint=error.hint) from error


def select(cells: Iterable[Cell], pattern: str) -> tuple[Cell, ...]:
    """Returns the cells whose id matches the glob. Raises UsageError, with the nearest id, if none does."""
    known = tuple(cells)
    chosen = tuple(cell for cell in known if fnmatch.fnmatchcase(cell.id, pattern))
    if not chosen:
        ids = [cell.id for cell in known]
        message = f"no cell matches: {pattern}"
        begun = [each for each in ids if each.startswith(pattern)]
        near = f"--only '{pattern}*' is {', '.join(begun)}" if begun else near_miss(pattern, ids)
        raise UsageError(message, hint=near or f"the cells are {', '.join(ids)}")
    return chosen


def _cell_of(name: str, cell_id: str, cells: Iterable[Cell]) -> Cell:
    known = {cell.id: cell for cell in cells}
    if cell_id not in known:
        message = f"devcontainer {name} is made from a cell, and none is called: {cell_id}"
        raise MatrixError(message, hint=near_miss(cell_id, known) or "python -m images list names the cells")
    return known[cell_id]


def parse_source_sha256(text: str, *, distribution: str, release: str, lock: str) -> str:
    """Returns the only hash of a source lock, which must name this release and nothing else."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", text, re.MULTILINE)
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", text)
    if pins != [(distribution, release)] or len(hashes) != 1:
        message = f"images/locks/{lock}.txt must lock {distribution}=={release} alone, with one hash: {text[:120]!r}"
        raise MatrixError(message, hint="change the pin in the .in file and the matrix together, then: images lock")
    return str(hashes[0])


def _lock_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"lock cannot be read: {LOCKS / path.name}: {error}"
        raise MatrixError(message, hint=f"python -m images lock {path.stem}") from error


def _base(name: str, row: _BaseRow) -> Base:
    if (row.digest is None) != (row.status == "unresolved"):
        message = f"base {name}: status {row.status} does not fit digest: {row.digest}"
        raise MatrixError(message, hint="a base without a digest is `unresolved`, and only that one")
    if row.status == "unverified" and row.source is None:
        message = f"base {name}: an unverified digest needs the public file that it was copied from: source is missing"
        raise MatrixError(message, hint="name repository, path, commit and date under `source:`")
    if (row.status == "verified") != (row.asked is not None):
        message = f"base {name}: status {row.status} does not fit the day on which a registry was asked: {row.asked}"
        raise MatrixError(message, hint="python -m images lock --bases writes both")
    return Base(
        name=name,
        image=row.image,
        digest=row.digest,
        status=row.status,
        platforms=tuple(row.platforms),
        distribution=row.distribution,
        suite=row.suite,
    )


def _toolkit(
    cuda: str, row: _ToolkitRow, bases: Mapping[str, Base], known: Mapping[str, _LockRow], locks: Mapping[str, str]
) -> Toolkit:
    where = f"toolkit {cuda}"
    given = {"wheels": row.lock, "image": row.image, "debian": row.base}
    if [form for form, value in given.items() if value] != [row.form]:
        message = f"{MATRIX_FILE}: {where}: form {row.form} does not fit what is given: {given}"
        raise MatrixError(message, hint="wheels have a lock, image an image, debian a base, and nothing else")
    if row.lock:
        _refuse_unknown(row.lock, known, f"{where}: lock")
        _refuse_unlocked(cuda, row, locks.get(row.lock, ""))
    for name in filter(None, (row.image, row.base)):
        _refuse_unknown(name, bases, f"{where}: {row.form}")
    return Toolkit(**{**row.model_dump(), "cuda": cuda, "image": bases[row.image] if row.image else None})


def _refuse_unlocked(cuda: str, row: _ToolkitRow, text: str) -> None:
    pin = f"cuda-toolkit=={row.release}"
    if not re.search(rf"^{re.escape(pin)}(?:\s|$)", text, re.MULTILINE) or not row.release.startswith(f"{cuda}."):
        message = f"{MATRIX_FILE}: toolkit {cuda}: images/locks/{row.lock}.txt does not lock: {pin}"
        raise MatrixError(message, hint=f"python -m images lock {row.lock}, and let the release say what it wrote")


def _scope(row: _ScopeRow) -> Scope:
    return Scope(
        engine=row.engine,
        cuda=tuple(row.cuda) if row.cuda else None,
        sm=tuple(row.sm) if row.sm else None,
        platforms=tuple(row.platforms) if row.platforms else None,
        why=row.why,
    )


def _refuse_contradictions(cells: Iterable[Cell], scopes: Iterable[Scope]) -> None:
    scopes = tuple(scopes)
    for cell in cells:
        places = [
            ({"engine": cell.engine.name, "cuda": cell.target.cuda or "", "sm": form.sm}, platform)
            for form in cell.sm_forms
            for platform in cell.platforms
            if form.is_for(platform)
        ]
        for place, platform in places:
            if scope := next((each for each in scopes if each.covers(**place, platform=platform)), None):
                message = f"{MATRIX_FILE}: cell {cell.id} on {platform} is out of scope as well: {scope.why}"
                raise MatrixError(message, hint="take it out of cells or out of out_of_scope")


def _engine(
    name: str, row: _EngineRow, known: Mapping[str, _LockRow], locks: Mapping[str, str], files: EngineFiles
) -> Engine:
    for lock in filter(None, (row.source.lock, row.backend_lock)):
        _refuse_unknown(lock, known, f"engine {name}: lock")
    _refuse_half_compiled(name, row)
    text = locks.get(row.source.lock, "")
    variants = {
        platform: Variants(offered=tuple(row.offered), built=tuple(row.built), emulated=dict(row.emulated))
        for platform, row in row.cpu_variants.items()
    }
    return Engine(
        name=name,
        **row.model_dump(exclude={"source", "cpu_variants", "sm_forms", "without_cuda"}),
        source=_wheels(name, row.source, text) if row.source.wheels else _sdist(row.source, text),
        cpu_variants=variants,
        sm_forms={sm: SmForm(sm=sm, **form.model_dump()) for sm, form in row.sm_forms.items()},
        cuda=parse_cuda(text, lock=row.source.lock) if row.source.wheels else None,
        files=files,
        without_cuda=_without_cuda(name, row, row.without_cuda, known, locks, files) if row.without_cuda else None,
    )


def _without_cuda(
    name: str,
    engine: _EngineRow,
    row: _WithoutCudaRow,
    known: Mapping[str, _LockRow],
    locks: Mapping[str, str],
    files: EngineFiles,
) -> Engine:
    """Returns the CPU build of an engine from wheels. A compiled engine has one source for every machine."""
    _refuse_unknown(row.source.lock, known, f"engine {name}: without_cuda: lock")
    if not engine.source.wheels or not row.source.wheels:
        message = f"{MATRIX_FILE}: engine {name}: without_cuda is for engines from wheels, here and there"
        raise MatrixError(message, hint="name the wheels of both by platform, or take it out")
    return Engine(
        name=name,
        title=engine.title,
        license=engine.license,
        version=row.version,
        build=None,
        commit="",
        files=files.without_cuda or files,
        source=_wheels(name, row.source, locks.get(row.source.lock, "")),
        backend_lock=None,
        patches=(),
        cpu_variants={},
        sm_forms={},
        publisher=row.publisher,
        index_files=tuple(IndexFile(**file.model_dump(exclude={"status", "source"})) for file in row.index_files),
    )


def _refuse_half_compiled(name: str, row: _EngineRow) -> None:
    """Refuses an engine that lacks part of what compiling takes, or one from wheels that has any of it."""
    given = {"build": row.build, "backend_lock": row.backend_lock, "patches": row.patches}
    wrong = [key for key, value in given.items() if bool(value) is bool(row.source.wheels)]
    if wrong:
        how = "comes in wheels and has" if row.source.wheels else "is compiled and lacks"
        message = f"{MATRIX_FILE}: engine {name} {how}: {', '.join(wrong)}"
        raise MatrixError(message, hint="build, backend_lock and patches belong to a source without `wheels:`")


def _sdist(row: _SourceRow, text: str) -> Source:
    sha256 = parse_source_sha256(text, distribution=row.distribution, release=row.release, lock=row.lock)
    return Source(**row.model_dump(), sha256=sha256)


def _wheels(name: str, row: _SourceRow, text: str) -> Source:
    """Checks that the lock pins this release with each wheel's hash, and everything that the wheels need."""
    pin = re.search(rf"^{re.escape(row.distribution)}=={re.escape(row.release)}(?=\s)(?:.*\\\n)*.*", text, re.MULTILINE)
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", pin[0]) if pin else []
    for platform, sha256 in row.wheels.items():
        if sha256 not in hashes:
            message = (
                f"{MATRIX_FILE}: engine {name}: images/locks/{row.lock}.txt does not lock its wheel of "
                f"{row.distribution}=={row.release} for {platform}: {sha256}"
            )
            raise MatrixError(message, hint=f"python -m images lock {row.lock}, and copy the hash of that wheel")
    return Source(**row.model_dump())


def parse_cuda(text: str, *, lock: str) -> str:
    """Returns the CUDA release of a lock's wheels, such as `13.0`, by the metapackage that they all need."""
    found = re.search(r"^cuda-toolkit==(\d+\.\d)(?:\.|\s)", text, re.MULTILINE)
    if found is None:
        message = f"images/locks/{lock}.txt names no CUDA release: cuda-toolkit"
        raise MatrixError(message, hint=f"cuda-toolkit==13.0.3.0 in images/locks/{lock}.in, then: images lock {lock}")
    return found[1]


def _target(name: str, row: _TargetRow) -> Target:
    sms = (row.sm,) if isinstance(row.sm, str) else tuple(row.sm or ())
    cuda = f"cu{row.cuda.replace('.', '')}" if row.cuda else "cpu"
    expected = "-".join((cuda, *(f"sm{sm}" for sm in sms)))
    if (sms and row.cuda is None) or name != expected:
        message = f"target {name}: its name does not say cuda {row.cuda}, sm {', '.join(sms) or None}"
        raise MatrixError(message, hint=f"call it {expected}; an SM needs the CUDA release that it is compiled with")
    if sorted(set(sms), key=int) != list(sms):
        message = f"target {name}: its chips are not in order, each once: {', '.join(sms)}"
        raise MatrixError(message, hint=f"sm: [{', '.join(sorted(set(sms), key=int))}]")
    return Target(name=name, cuda=row.cuda, sms=sms)


def _cells(
    row: _CellRow,
    engines: Mapping[str, Engine],
    targets: Mapping[str, Target],
    bases: Mapping[str, Base],
    toolkits: Mapping[str, Toolkit],
) -> list[Cell]:
    _refuse_unknown(row.engine, engines, "cells: engine")
    _refuse_unknown(row.base, bases, f"cells of {row.engine}: base")
    for name in row.targets:
        _refuse_unknown(name, targets, f"cells of {row.engine}: target")
    return [_cell(row, engines[row.engine], targets[name], bases, toolkits) for name in row.targets]


def _cell(
    row: _CellRow, engine: Engine, target: Target, bases: Mapping[str, Base], toolkits: Mapping[str, Toolkit]
) -> Cell:
    engine = engine.for_target(target)
    _refuse_untooled(target, engine, toolkits)
    _refuse_unwheeled(row, engine)
    return Cell(
        engine=engine,
        target=target,
        template=row.template,
        base=bases[row.base],
        platforms=tuple(row.platforms),
        size_budget_mib=row.size_budget_mib,
        toolkit=toolkits.get(target.cuda or "") if engine.is_compiled else None,
        sm_forms=_forms(target, engine),
    )


def _forms(target: Target, engine: Engine) -> tuple[SmForm, ...]:
    """Returns the target's forms; for wheels all that they carry, since less cannot be asked for."""
    if target.cuda is None:
        return ()
    return tuple(engine.sm_forms[sm] for sm in target.sms) if engine.is_compiled else tuple(engine.sm_forms.values())


def _refuse_untooled(target: Target, engine: Engine, toolkits: Mapping[str, Toolkit]) -> None:
    """Refuses a CUDA target without a toolkit for its release and chip; wheels are of one release."""
    if not engine.is_compiled and target.cuda != engine.cuda:
        message = f"{MATRIX_FILE}: target {target.name}: {engine.title}'s wheels are made with CUDA {engine.cuda}"
        raise MatrixError(message, hint="take it out of cells, or lock a release of the engine with that CUDA")
    if target.cuda is not None:
        _refuse_unknown(target.cuda, toolkits, f"target {target.name}: toolkit")
    if target.cuda is not None and bool(target.sms) is not engine.is_compiled:
        how = "is compiled for chips that its target names" if engine.is_compiled else "comes in wheels, for all chips"
        message = f"{MATRIX_FILE}: target {target.name} does not fit {engine.title}, which {how}"
        release = f"cu{target.cuda.replace('.', '')}"
        raise MatrixError(message, hint=f"its target is called {release}{'-smNN' if engine.is_compiled else ''}")
    for sm in target.sms:
        _refuse_unknown(sm, engine.sm_forms, f"engine {engine.name}: sm_forms: target {target.name}")


def _refuse_unwheeled(row: _CellRow, engine: Engine) -> None:
    missing = [platform for platform in row.platforms if platform not in engine.source.wheels]
    if missing and not engine.is_compiled:
        message = f"{MATRIX_FILE}: cells of {row.engine}: its source has no wheel for: {', '.join(missing)}"
        raise MatrixError(message, hint=f"it has {', '.join(engine.source.wheels)}")


def _refuse_unknown(name: str, known: Iterable[str], where: str) -> None:
    names = list(known)
    if name not in names:
        message = f"{MATRIX_FILE}: {where} is not defined: {name}"
        raise MatrixError(message, hint=near_miss(name, names) or f"defined are {', '.join(names)}")
