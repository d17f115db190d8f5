"""Lists the machine code of a file, kernel by kernel, and decides if one GPU runs all of it without a JIT.

cuobjdump names targets and kernels; the file's own fat binary headers say which of them belong together. That matters:
a template kernel stands once in every translation unit that uses it, and each unit loads only what it brought itself.
"""

from __future__ import annotations

import fnmatch
import io
import re
import struct
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from pydantic import Field

from images import docker, rows
from images.errors import VerificationError
from images.matrix import compat
from images.matrix.matrix import Platform
from images.rows import Row

Kind = Literal["elf", "ptx"]
T = TypeVar("T")

TARGET = re.compile(r"^(?:sm_|compute_)?(\d{2,3})([af]?)$")
ELEMENT = re.compile(r"^Fatbin (\w+) code:$")
ARCH = re.compile(r"^arch = (\S+)$")
KERNEL = re.compile(r"^FUNC\s+\w+\s+\w+\s+ENTRY\s+(\S+)$")
PTX_KERNEL = re.compile(r"^(?:\.(?:visible|weak|extern)\s+)?\.entry\s+([\w$.@%]+)")
LISTED = re.compile(r"^ELF file\s+\d+: .*\.sm_(\w+)\.cubin$")
GAPS_FORM = "native: partial, source: …, gaps: [{library: …, kernels: […]}]"
NO_CODE = "does not contain device code"

# Of NVIDIA's own toolkit and of torch, by the file's name: what they carry is listed, and judged by nobody here.
TOOLKIT = re.compile(
    r"^lib(?:cublas|cublasLt|cudart|cudnn\w*|cufft\w*|cufile\w*|cupti|curand|cusolver\w*|cusparse\w*|nccl|npp\w+|"
    r"nvJitLink|nvfatbin|nvjpeg|nvrtc[\w-]*|nvshmem\w*|nvToolsExt|torch_cuda\w*)(?:-[0-9a-f]+)?\.so(?:\.|$)"
)

SHARED = re.compile(r"\.so(?:\.\d+)*$")
DYNAMIC_TAG_BYTES = 8  # ELF, 64 bit

FATBIN_MAGIC = 0xBA55ED50
FATBIN_START = struct.pack("<I", FATBIN_MAGIC)
FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, header size, size of what follows
FATBIN_ENTRY = struct.Struct("<HHIQ")  # kind, version, header size, size of what follows
FATBIN_ARCH_OFFSET = 28
FATBIN_KINDS: Mapping[int, Kind] = {1: "ptx", 2: "elf"}
# An executable's own code, else an object's that is not linked yet: the order in which cuobjdump looks.
FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")


@dataclass(frozen=True, kw_only=True)
class Element:
    """One cubin or one PTX text of a fat binary, and the kernels in it."""

    kind: Kind
    target: str  # `90a`, `120f`
    kernels: frozenset[str]  # mangled


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of one translation unit."""

    name: str
    sass: tuple[str, ...]
    ptx: tuple[str, ...]

    def runs_natively(self, sm: int) -> bool:
        return any(runs_natively(target, sm) for target in self.sass)

    def runs_from_ptx(self, sm: int) -> bool:
        """True if the driver must compile it for this chip, and can."""
        return not self.runs_natively(sm) and any(compiles_for(target, sm) for target in self.ptx)


@dataclass(frozen=True, kw_only=True)
class Library:
    """A file. NVIDIA's own libraries have only `targets`; a file without GPU code has neither."""

    path: str
    kernels: tuple[Kernel, ...] = ()
    targets: Mapping[str, int] | None = None  # cubins by target; None: judged by its kernels
    unlinked: int = 0  # translation units of intermediate code alone, which a linker compiles when the program starts

    def count(self, sm: int) -> Count:
        native = sum(kernel.runs_natively(sm) for kernel in self.kernels)
        ptx = sum(kernel.runs_from_ptx(sm) for kernel in self.kernels)
        return Count(library=Path(self.path).name, kernels=len(self.kernels), native=native, ptx=ptx)


@dataclass(frozen=True, kw_only=True)
class Count:
    """Numbers of one library's kernels by how they run on one chip; the rest cannot run there."""

    library: str
    kernels: int
    native: int
    ptx: int  # compiled by the driver

    def __str__(self) -> str:
        return f"{self.kernels} kernels, {self.native} native, {self.ptx} from PTX"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A kernel without machine code for the SM."""

    library: str
    kernel: str
    sass: tuple[str, ...]
    ptx: tuple[str, ...]
    is_declared: bool

    def __str__(self) -> str:
        has = [*(f"sm_{target}" for target in self.sass), *(f"PTX of compute_{target}" for target in self.ptx)]
        return f"{self.library}: {self.kernel} has only {', '.join(has)}"


@dataclass(frozen=True, kw_only=True)
class KnownGaps:
    """Kernels that may lack machine code: library and kernel as globs."""

    kernels: tuple[tuple[str, str], ...] = ()
    counts: tuple[Count, ...] = ()  # counts of the libraries it was made from; empty: nobody counted

    def admits(self, library: str, kernel: str) -> bool:
        return any(_matches(library, kernel, known) for known in self.kernels)


@dataclass(frozen=True, kw_only=True)
class Report:
    sm: int
    libraries: tuple[Library, ...]
    gaps: tuple[Gap, ...]
    stale: tuple[str, ...]  # known gaps that are none any more, and libraries that are not as they were counted

    @property
    def kernel_count(self) -> int:
        return sum(len(library.kernels) for library in self.libraries)

    @property
    def faults(self) -> list[str]:
        """Faults in words. A gate that saw no kernel proves nothing, and fails."""
        nothing = [] if self.kernel_count else [f"no kernel in any of {len(self.libraries)} files"]
        unlinked = [
            f"{library.path}: {library.unlinked} units have only code for link-time optimization"
            for library in self.libraries
            if library.unlinked
        ]
        return [*nothing, *unlinked, *(str(gap) for gap in self.gaps if not gap.is_declared), *self.stale]


class _PlatformRow(Row):
    library: str
    platforms: tuple[Platform, ...] | None = None  # None: any

    def is_for(self, platform: str | None) -> bool:
        return self.platforms is None or platform is None or platform in self.platforms


class _GapRow(_PlatformRow):
    runs: Literal["from PTX", "never"] | None = None
    kernels: tuple[str, ...] = Field(min_length=1)


class _CountRow(_PlatformRow):
    kernels: int
    native: int
    ptx: int


class _ListedRow(_PlatformRow):
    """Cubins by target of a wheel that is listed but not judged."""

    targets: dict[str, int]


class _GapFile(Row):
    native: Literal["partial"]
    source: str  # what was read
    libraries: tuple[_CountRow, ...] = ()
    listed: tuple[_ListedRow, ...] = ()
    gaps: tuple[_GapRow, ...] = Field(min_length=1)


def compiles_for(target: str, sm: int) -> bool:
    """True if a driver compiles PTX of `target` for the chip `sm`. A suffix narrows the chips as in a cubin."""
    number, suffix = parse_target(target)
    return runs_natively(target, sm) if suffix else number <= sm


def runs_natively(target: str, sm: int) -> bool:
    """True if a cubin of `target` (`80`, `sm_90a`, `120f`) runs on the chip `sm` without its PTX, by compat's rule."""
    number, suffix = parse_target(target)
    return compat.runs_on(f"{number}{suffix}", str(sm))


def parse_target(target: str) -> tuple[int, str]:
    """Turns `sm_120f` into (120, "f"). Raises VerificationError for anything else."""
    match = TARGET.match(target)
    if match is None:
        message = f"not an SM target: {target}"
        raise VerificationError(message, hint="such as 90, 90a, sm_120f")
    return int(match.group(1)), match.group(2)


def judge(libraries: Sequence[Library], sm: int, known: KnownGaps | None = None) -> Report:
    """Decides which kernels of these files have no machine code for this chip. Pure."""
    admitted = known or KnownGaps()
    gaps = tuple(
        Gap(
            library=library.path,
            kernel=kernel.name,
            sass=kernel.sass,
            ptx=kernel.ptx,
            is_declared=admitted.admits(library.path, kernel.name),
        )
        for library in libraries
        for kernel in library.kernels
        if not kernel.runs_natively(sm)
    )
    stale = tuple(
        f"known gap is none any more: {pair[0]}: {pair[1]}"
        for pair in admitted.kernels
        if not any(_matches(gap.library, gap.kernel, pair) for gap in gaps)
    ) + tuple(_miscounted(libraries, sm, admitted.counts))
    return Report(sm=sm, libraries=tuple(libraries), gaps=gaps, stale=stale)


def _miscounted(libraries: Sequence[Library], sm: int, counts: Sequence[Count]) -> Iterator[str]:
    """Compares counts: a glob admits any number of kernels, so a larger number shows only here."""
    seen = {count.library: count for count in (library.count(sm) for library in libraries if library.kernels)}
    for expected in counts:
        found = seen.get(expected.library)
        if found != expected:
            yield f"{expected.library}: {found or 'is not there'}, known were {expected}"
    for name in sorted(set(seen) - {count.library for count in counts}) if counts else ():
        yield f"{name}: {seen[name]}, and nobody counted it before"


def load_known_gaps(path: Path, platform: str | None = None) -> KnownGaps:
    """Reads the known gaps of one platform, or of all with None. Raises MatrixError if they cannot be read."""
    return parse_known_gaps(rows.load(path, root=Path(), hint=GAPS_FORM), where=path.as_posix(), platform=platform)


def parse_known_gaps(data: object, *, where: str, platform: str | None = None) -> KnownGaps:
    file = rows.check(data, _GapFile, name=where, hint=GAPS_FORM)
    return KnownGaps(
        kernels=tuple((row.library, kernel) for row in file.gaps if row.is_for(platform) for kernel in row.kernels),
        counts=tuple(
            Count(library=row.library, kernels=row.kernels, native=row.native, ptx=row.ptx)
            for row in file.libraries
            if row.is_for(platform)
        ),
    )


def parse_elements(lines: Iterable[str]) -> list[Element]:
    """Parses `cuobjdump -symbols -ptx`, in order. Other kinds of code than cubin and PTX are skipped."""
    found: list[tuple[str, str, set[str]]] = []
    for line in lines:
        if match := ELEMENT.match(line):
            found.append((match.group(1), "", set()))
        elif found and (match := ARCH.match(line)) and not found[-1][1]:
            found[-1] = (found[-1][0], match.group(1), found[-1][2])
        elif found and (match := KERNEL.match(line) or PTX_KERNEL.match(line)):
            found[-1][2].add(match.group(1))
    return [_element(kind, arch, names) for kind, arch, names in found if kind in ("elf", "ptx")]


def parse_listing(lines: Iterable[str]) -> dict[str, int]:
    """Parses `cuobjdump --list-elf`: cubins by target. cuobjdump writes `120` for `120f`."""
    targets = [match.group(1) for line in lines if (match := LISTED.match(line))]
    return {target: targets.count(target) for target in sorted(set(targets), key=parse_target)}


def parse_units(data: bytes) -> list[list[tuple[Kind, int]]]:
    """Returns kind and chip of each element of a file's fat binaries, one list for each translation unit.

    Empty without GPU code; a unit without cubin and PTX is empty too. Raises struct.error if the file ends too early.
    """
    return [list(_entries(data, start, end)) for start, end in _containers(data)]


def join(path: str, elements: Sequence[Element], units: Sequence[Sequence[tuple[Kind, int]]]) -> Library:
    """Returns kernels by unit. Raises VerificationError if cuobjdump and the file's headers disagree."""
    queues = {kind: iter([each for each in elements if each.kind == kind]) for kind in ("elf", "ptx")}
    kernels: list[Kernel] = []
    for unit in units:
        mine = [_next(path, queues[kind], kind, number) for kind, number in unit]
        kernels += _kernels(mine)
    left = sum(len(list(queue)) for queue in queues.values())
    if left:
        message = f"{path}: cuobjdump lists {left} elements more than the file's headers"
        raise VerificationError(message, hint="the gate reads shared libraries, objects and .fatbin files")
    return Library(path=path, kernels=tuple(kernels), unlinked=sum(not unit for unit in units))


def describe(library: Library, sm: int) -> str:
    """Returns one line about one file."""
    if library.targets is not None:
        listed = ", ".join(f"sm_{target}: {count}" for target, count in library.targets.items())
        return f"toolkit {library.path}  cubins: {listed or 'none'}"
    if not library.kernels:
        return f"gaps {library.path}  not linked" if library.unlinked else f"no GPU code {library.path}"
    native = [kernel for kernel in library.kernels if kernel.runs_natively(sm)]
    beside = sum(bool(kernel.ptx) for kernel in native)
    targets = sorted({target for kernel in library.kernels for target in kernel.sass}, key=parse_target)
    words = f"{len(native)} of {len(library.kernels)} kernels run natively on SM {sm}, {beside} with PTX beside it"
    verdict = "ok  " if len(native) == len(library.kernels) else "gaps"
    return f"{verdict} {library.path}  {words}; SASS: {' '.join(targets)}"


def query_library(tool: Path, file: Path, *, name: str | None = None) -> Library:
    """Asks cuobjdump about one file. Raises VerificationError if it cannot be read or is cut off."""
    path = name or file.as_posix()
    if SHARED.search(path):
        _refuse_no_library(file, path)
    if TOOLKIT.match(Path(path).name):
        return Library(path=path, targets=_targets(tool, file, path))
    elements = _dump(tool, ("-symbols", "-ptx"), file, parse_elements) or []
    return join(path, elements, read_units(file, path))


def _targets(tool: Path, file: Path, path: str) -> dict[str, int]:
    """Returns cubins by target, from the file's headers if cuobjdump reads none.

    That of CUDA 13 takes code for chips before SM 75, which cuBLAS 12.4 has, for no ELF. Headers write `90` for `90a`.
    """
    try:
        return _dump(tool, ("--list-elf",), file, parse_listing) or {}
    except VerificationError:
        numbers = [number for unit in read_units(file, path) for kind, number in unit if kind == "elf"]
        if not numbers:
            raise
        return {str(number): numbers.count(number) for number in sorted(set(numbers))}


def _refuse_no_library(file: Path, path: str) -> None:
    """Raises VerificationError for a file that only has the name of a library.

    cuobjdump reports no device code for a file of zeros, just as for a sound library of the CPU.
    """
    with file.open("rb") as stream:
        try:
            tables = [each["p_offset"] for each in ELFFile(stream).iter_segments() if each["p_type"] == "PT_DYNAMIC"]
        except ELFError:
            tables = []
        for offset in tables:  # zero is the tag that ends the table of what the linker must know
            stream.seek(offset)
            if any(stream.read(DYNAMIC_TAG_BYTES)):
                return
    message = f"{path} is no shared library"
    raise VerificationError(message, hint="zeros, or text? make it anew; was the disk full?")


def read_units(file: Path, path: str) -> list[list[tuple[Kind, int]]]:
    """Returns the units of a file. Raises VerificationError if it is cut off: cuobjdump would see no device code."""
    data = file.read_bytes()
    try:
        _refuse_beyond(data, 1)
        return parse_units(data)
    except struct.error as error:
        message = f"{path} is cut off at {len(data)} bytes"
        raise VerificationError(message, hint="make it anew; was the disk full?") from error


def find_tool(wanted: Path | None = None) -> Path:
    """Returns the given cuobjdump, else the locked wheel's. Raises VerificationError if there is none."""
    found = wanted or Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/cuobjdump"
    if not found.is_file():
        message = f"cuobjdump is not here: {found}"
        raise VerificationError(message, hint="pip install --require-hashes -r images/locks/cuda-tools.txt")
    return found


def _dump(tool: Path, flags: tuple[str, ...], file: Path, parse: Callable[[Iterable[str]], T]) -> T | None:
    """Returns cuobjdump's output, None if the file has no GPU code."""
    parsed, done = docker.feed((str(tool), *flags, str(file)), parse, cwd=file.parent)
    said = " ".join(done.lines)
    if done.code == 0:
        return parsed
    if NO_CODE in said:
        return None
    message = f"cuobjdump cannot read {file}: {said or f'exit {done.code}'}"
    raise VerificationError(message)


def _element(kind: str, arch: str, names: Iterable[str]) -> Element:
    number, suffix = parse_target(arch)
    return Element(kind="elf" if kind == "elf" else "ptx", target=f"{number}{suffix}", kernels=frozenset(names))


def _next(path: str, queue: Iterator[Element], kind: Kind, number: int) -> Element:
    element = next(queue, None)
    if element is None or parse_target(element.target)[0] != number:
        seen = f"sm_{element.target}" if element else "nothing"
        message = f"{path}: the file's headers name {kind} for sm_{number}, where cuobjdump lists {seen}"
        raise VerificationError(message, hint="a newer cuobjdump may read it: images lock cuda-tools --upgrade")
    return element


def _kernels(unit: Sequence[Element]) -> Iterator[Kernel]:
    for name in sorted({name for element in unit for name in element.kernels}):
        having = [element for element in unit if name in element.kernels]
        yield Kernel(
            name=name,
            sass=tuple(element.target for element in having if element.kind == "elf"),
            ptx=tuple(element.target for element in having if element.kind == "ptx"),
        )


def _containers(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each fat binary's elements."""
    position, end = _fatbin_range(data)
    while position + FATBIN_HEADER.size <= end:
        magic, _, header_size, size = FATBIN_HEADER.unpack_from(data, position)
        if magic == FATBIN_MAGIC:
            _refuse_beyond(data, position + header_size + size)
            yield position + header_size, position + header_size + size
            position += header_size + size
        elif magic == 0:
            position += 4  # between two of them: they stand on multiples of 8 or 16
        else:
            message = f"unknown bytes among the fat binaries: {magic:#x} at {position:#x}"
            raise VerificationError(message)


def _entries(data: bytes, position: int, end: int) -> Iterator[tuple[Kind, int]]:
    while position < end:
        kind, _, header_size, size = FATBIN_ENTRY.unpack_from(data, position)
        if kind in FATBIN_KINDS:
            yield FATBIN_KINDS[kind], struct.unpack_from("<I", data, position + FATBIN_ARCH_OFFSET)[0]
        position += header_size + size


def _fatbin_range(data: bytes) -> tuple[int, int]:
    """Returns the section that holds them; the whole file if it is no ELF."""
    if data[:4] != b"\x7fELF":
        return 0, len(data) if data[:4] == FATBIN_START else 0
    ranges = dict(_elf_sections(data))
    return next((ranges[name] for name in FATBIN_SECTIONS if name in ranges), (0, 0))


def _elf_sections(data: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields name, begin and end of each section. All must be there: without the table of names none has one."""
    try:
        for section in ELFFile(io.BytesIO(data)).iter_sections():
            start, size = section["sh_offset"], section.data_size if section["sh_type"] != "SHT_NOBITS" else 0
            _refuse_beyond(data, start + size if size else 0)
            yield section.name, (start, start + size)
    except ELFError as error:
        raise struct.error(str(error)) from error


def _refuse_beyond(data: bytes, end: int) -> None:
    if end > len(data):
        message = f"a fat binary ends at {end:#x}, the file at {len(data):#x}"
        raise struct.error(message)


def _matches(library: str, kernel: str, known: tuple[str, str]) -> bool:
    # Millions of times for a wheel: the folder is cut off by hand, since a Path takes longer than all the rest.
    return fnmatch.fnmatchcase(library.rpartition("/")[2], known[0]) and fnmatch.fnmatchcase(kernel, known[1])
