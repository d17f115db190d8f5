"""A machine described by a file: the output of `appliance probe --json`, a doctor's bundle, or the same keys written by
hand as JSON or YAML (docs/plan.md).

A missing fact is unknown, as if a probe had found nothing. Facts that a plan requires are assumed, and the assumption
is reported. A contradiction is refused with its key, because no such machine can exist.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from appliance.documents import read
from appliance.errors import ConfigError, printable
from appliance.probe.machine.hardware import Cpu, Gpu, GpuHolder, Hardware, Memory, Volume
from appliance.values import dataclass

STDIN = "-"
MAX_BYTES = 4 * 2**20  # a bundle has some 100 KB
MAX_YAML_BYTES = 64 * 2**10  # written by hand; the YAML parser needs a second for each 100 KB
MAX_GPUS, MAX_CPUS, MAX_SOCKETS = 64, 8192, 16
LARGEST = 2**50  # limit for any number: MiB, MHz, GB/s, pids
SYSTEM_MIB = 2048  # assumed memory use of the operating system if the file does not give the free memory
HIDDEN = "<hidden>"  # written by a doctor's bundle
# Values that `as_document` adds and that follow from the facts.
_DERIVED: Mapping[type, frozenset[str]] = {
    Cpu: frozenset({"threads_max", "cores"}),
    Memory: frozenset({"usable_mib"}),
}
_MAY_BE_ZERO = frozenset({
    "cpus", "free_mib", "hugetlb_mib", "id", "index", "limit_used_mib", "memlock_limit_mib", "memory_mib", "numa_node",
    "nvlink_peers", "pid", "shm_mib", "used_mib", "available_mib", "vram_free_mib", "volume.total_mib",
})  # fmt: skip
# Far above today's machines: a larger value is a typing error.
_MOST: Mapping[str, float] = {
    "bandwidth_gb_s": 40_000,
    "dram_gb_s": 4_000,
    "logical": MAX_CPUS,
    "memory_gb_s": 40_000,
    "overlapped_dram_gb_s": 4_000,
    "overlapped_pinned_gb_s": 1_000,
    "pageable_gb_s": 1_000,
    "pcie_generation": 7,
    "pcie_generation_max": 7,
    "physical": MAX_CPUS,
    "pinned_gb_s": 1_000,
    "sm_clock_mhz": 10_000,
    "sm_count": 1_024,
}
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_LANES = (1, 2, 4, 8, 16)
# no GPU with these compute capabilities supports MIG
_WITHOUT_MIG = {"60", "61", "62", "70", "72", "75", "86", "87", "89", "121"}
_UNQUOTED = re.compile(r"expected `str(?: \| null)?`, got `(?:int|float)`")
_VERSION = re.compile(r"\d+(\.\d+)*")  # of a driver or of CUDA: 580.65.06, 13.0
_SM = re.compile(r"[1-9]\d{1,2}[af]?")


@dataclass(frozen=True, kw_only=True)
class DescribedMachine:
    """Machine from a file. `assumed` lists the facts that the file lacks.

    For a doctor's bundle, `build_id` is its image's build and `settings` are the settings that its user gave, by name.
    """

    source: str
    hardware: Hardware
    assumed: tuple[str, ...] = ()
    build_id: str | None = None
    settings: Mapping[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for a person."""
        told = [f"{self.source} does not say {words}" for words in self.assumed]
        if self.settings:
            asked = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.settings.items())
            told.append(f"{self.source} is of a start with {asked}: give them as well for the same plan")
        if self.build_id:
            told.append(f"{self.source} is of the image with build id {self.build_id}")
        return tuple(told)


def read_machine(name: str) -> DescribedMachine:
    """Read a machine from a file, or from stdin for "-". Raises ConfigError (10) with file and key."""
    source = "stdin" if name == STDIN else name
    return parse_machine(_text(name, source), source)


def parse_machine(text: str, source: str) -> DescribedMachine:
    found = _Reader(source)
    document = found.load(text)
    bundle = document if isinstance(document.get("hardware"), dict) else {}
    hardware = found.hardware(bundle.get("hardware", document))
    image = bundle.get("image")
    return DescribedMachine(
        source=source,
        hardware=hardware,
        assumed=tuple(found.assumed),
        build_id=str(image.get("build_id")) if isinstance(image, dict) else None,
        settings=_asked(bundle.get("settings")),
    )


def _text(name: str, source: str) -> str:
    try:
        if name == STDIN:
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            _refuse(source, f"it is larger than {MAX_BYTES // 2**20} MiB")
        return data.decode("utf-8-sig")
    except OSError as error:
        _refuse(source, f"it cannot be read: {error.strerror or error}")
    except ValueError as error:  # also a NUL in the name
        _refuse(source, f"it is not text: {error}")


def _refuse(source: str, words: str, key: str = "", hint: str | None = None) -> NoReturn:
    where = f"{key}: " if key else ""
    message = f"machine file {printable(source)}: {printable(where + words)}"
    raise ConfigError(message, hint=hint or "`appliance probe --json` writes such a file; docs/plan.md lists its keys")


def _asked(settings: object) -> dict[str, str]:
    """Return the settings that a bundle's user gave, without folders and files of that machine."""
    rows = settings if isinstance(settings, dict) else {}
    return {
        str(name): str(row.get("value"))
        for name, row in rows.items()
        if isinstance(row, dict) and row.get("source") not in ("default", "image", None) and not _is_place(str(name))
    }


def _is_place(name: str) -> bool:
    return name.endswith(("_dir", "_dirs")) or name in ("host", "hf_cache", "port", "model", "draft_model")


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the field types. Cached: compiling them takes most of the time for a file with eight cards."""
    return get_type_hints(kind)


class _Reader:
    """Reads one file and collects the assumptions."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.assumed: list[str] = []

    def load(self, text: str) -> dict[str, Any]:
        try:
            document = _json(text) if text.lstrip().startswith("{") else self._yaml(text)
        except (ValueError, RecursionError) as error:
            _refuse(self.source, f"it is neither JSON nor YAML: {' '.join(str(error).split())[:300]}")
        if document is None:
            _refuse(self.source, "it is empty")
        if not isinstance(document, dict):
            _refuse(self.source, f"it has no keys: {document!r:.80}")
        return document

    def _yaml(self, text: str) -> object:
        from appliance.probe.machine.plain_yaml import (
            load_plain,  # here: importing it costs 20 ms, and output of a program is JSON
        )

        if len(text.encode()) > MAX_YAML_BYTES:
            _refuse(self.source, f"as YAML it is larger than {MAX_YAML_BYTES // 2**10} KiB")
        return load_plain(text)

    def hardware(self, document: Mapping[str, Any]) -> Hardware:
        filled = self._filled(Hardware, document, "")
        for key, value in _numbers(filled, ""):
            self._check_number(key, value)
        try:
            found = read(Hardware, filled, volume=_volume)
        except ValueError as error:
            words = _key_first(str(error))
            is_unquoted = _UNQUOTED.search(words) is not None
            _refuse(self.source, words, hint="put the value in quotation marks" if is_unquoted else None)
        self._check(found)
        return _with_own_speeds(found)

    def _refuse(self, key: str, words: str) -> NoReturn:
        _refuse(self.source, words, key)

    def _filled(self, kind: type, given: object, key: str) -> dict[str, Any]:
        """Return every field of the dataclass: the given value, else the default, else None for unknown."""
        if not isinstance(given, Mapping):
            self._refuse(key, f"must hold keys, got {given!r:.60}")
        known = {field.name: field for field in fields(kind)}
        self._check_names(given, known.keys() | _DERIVED.get(kind, frozenset()), key)
        named = self._told(kind, dict(given), key)
        filled = {}
        for name, hint in _hints(kind).items():
            if name in named:
                filled[name] = self._value(hint, named[name], _join(key, name))
            elif (default := _default(known[name])) is not MISSING:
                filled[name] = default
            elif type(None) in get_args(hint):
                filled[name] = None
            else:
                self._refuse(_join(key, name), "it is missing, and a plan needs it")
        return filled

    def _check_names(self, given: Mapping[str, Any], known: Sequence[str] | set[str], key: str) -> None:
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), sorted(known), 1)
                meant = f"perhaps you meant '{near[0]}'" if near else None
                _refuse(self.source, "no such key", _join(key, str(name)), meant)

    def _value(self, hint: Any, given: object, key: str) -> object:  # noqa: ANN401 - a type
        if isinstance(given, str) and key.endswith(".cpus"):
            return self._cpus(given, key)
        kind = _dataclass_in(hint)
        if kind is None or (given is None and type(None) in get_args(hint)):
            return list(given) if isinstance(given, tuple) else given
        if not _is_many(hint):
            return self._filled(kind, given, key)
        if not isinstance(given, list):
            self._refuse(key, f"must be a list, got {given!r:.60}")
        if len(given) > MAX_GPUS:
            self._refuse(key, f"{len(given)} entries, at most {MAX_GPUS} are allowed")
        rows = [self._filled(kind, each, f"{key}[{at}]") for at, each in enumerate(given)]
        return _named_apart(rows) if kind is Gpu else rows

    def _cpus(self, text: str, key: str) -> list[int]:
        """Parse CPU numbers as lscpu writes them: "0-23,48-71"."""
        found: list[int] = []
        for part in text.split(","):
            ends = _RANGE.fullmatch(part.strip())
            first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
            if not first <= last <= MAX_CPUS:
                self._refuse(key, f"it is not a list of CPUs such as 0-23,48-71: {text!r:.60}")
            found += range(first, last + 1)
        return found

    def _with_sockets(self, given: dict[str, Any]) -> dict[str, Any]:
        """Add a NUMA node for each socket if the file only counts sockets.

        Each node gets an equal part of the CPUs and the memory. CPUs are numbered as in Linux: first all cores, then
        their second threads.
        """
        cpu = given.get("cpu")
        if not isinstance(cpu, dict) or "sockets" not in cpu:
            return given
        sockets, logical, cores = cpu["sockets"], cpu.get("logical"), cpu.get("physical") or cpu.get("logical")
        given = {**given, "cpu": {name: value for name, value in cpu.items() if name != "sockets"}}
        if type(sockets) is not int or not 1 <= sockets <= MAX_SOCKETS:
            self._refuse("cpu.sockets", f"it is not a number from 1 to {MAX_SOCKETS}: {sockets!r:.40}")
        if given.get("numa"):
            self._refuse("cpu.sockets", "numa already lists the nodes: remove one of the two")
        if type(logical) is not int or type(cores) is not int or not 0 < cores <= logical <= MAX_CPUS or sockets == 1:
            return given  # errors in these values are reported under their own keys
        if cores % sockets or logical % cores:
            self._refuse("cpu.sockets", f"{cores} cores with {logical} CPUs do not divide into {sockets} equal sockets")
        self.assumed.append(f"numa: taken as {sockets} nodes with equal parts of CPUs and memory, by cpu.sockets")
        return {**given, "numa": [self._node(given, at, sockets, logical, cores) for at in range(sockets)]}

    def _node(self, given: Mapping[str, Any], at: int, sockets: int, logical: int, cores: int) -> dict[str, Any]:
        each, memory = cores // sockets, given.get("memory")
        total = memory.get("total_mib") if isinstance(memory, dict) else None
        cpus = [cpu for first in range(each * at, logical, cores) for cpu in range(first, first + each)]
        return {"id": at, "cpus": cpus, "memory_mib": total // sockets if type(total) is int else None}

    def _told(self, kind: type, given: dict[str, Any], key: str) -> dict[str, Any]:
        """Add what is assumed for a machine that was written by hand, or whose bundle was cleaned."""
        for name in _DERIVED.get(kind, ()):
            given.pop(name, None)
        if kind is Hardware:
            given = self._with_sockets(given)
            given.setdefault("numa", [])
            given.setdefault("gpus", {})
            given.setdefault("volume", {})
            gpus = given["gpus"].get("gpus") if isinstance(given["gpus"], dict) else None
            given.setdefault("gpu_requested", bool(gpus))
        elif kind is Volume:
            given.setdefault("path", "/data")
            given.setdefault("is_writable", True)
        elif kind is Cpu and "isa" not in given:
            given["isa"] = []
            self.assumed.append("cpu.isa: planned with kernels that run on every CPU")
        elif kind is Memory and "total_mib" in given and "available_mib" not in given:
            total = given["total_mib"]
            given["available_mib"] = total  # if it is not a number, it is refused under its own key
            if isinstance(total, int):
                given["available_mib"] = max(0, total - SYSTEM_MIB)
                words = f"memory.available_mib: taken as {given['available_mib']:,}, all but {SYSTEM_MIB:,}"
                self.assumed.append(words)
        elif kind is GpuHolder:
            given.setdefault("pid", 0)
        elif kind is Gpu:
            self._tell_gpu(given, key)
        return given

    def _tell_gpu(self, given: dict[str, Any], key: str) -> None:
        given.setdefault("index", int(key.rpartition("[")[2].rstrip("]")))
        given["uuid"] = None if given.get("uuid") == HIDDEN else given.get("uuid")
        given["mig_parent"] = None if given.get("mig_parent") == HIDDEN else given.get("mig_parent")
        if given.get("is_unified") or given.get("problem"):
            return
        if given.get("vram_total_mib") is None:
            self._refuse(f"{key}.vram_total_mib", "it is missing, and a plan needs it")
        if "vram_free_mib" not in given:
            given["vram_free_mib"] = given["vram_total_mib"]
            self.assumed.append(f"{key}.vram_free_mib: taken as {given['vram_total_mib']}, all of it")

    def _check_number(self, key: str, value: float) -> None:
        name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
        if not math.isfinite(value) or abs(value) > LARGEST:
            self._refuse(key, f"no machine has that much: {value!s:.40}")
        if value < 0:
            self._refuse(key, f"it is negative: {value}")
        if value > (most := _MOST.get(name, LARGEST)):
            self._refuse(key, f"no machine has that much: {value:,}, more than {most:,}")
        if value == 0 and not {name, key} & _MAY_BE_ZERO:
            self._refuse(key, "it is 0; leave it out if it is unknown")

    def _check(self, hardware: Hardware) -> None:
        cpu, memory = hardware.cpu, hardware.memory
        self._check_most("cpu.physical", cpu.physical, "cpu.logical", cpu.logical)
        self._check_groups(cpu)
        self._check_numa(hardware)
        self._check_most("memory.available_mib", memory.available_mib, "memory.total_mib", memory.total_mib)
        self._check_most("memory.limit_used_mib", memory.limit_used_mib, "memory.limit_mib", memory.limit_mib)
        for name, version in (("driver", hardware.gpus.driver), ("cuda_driver", hardware.gpus.cuda_driver)):
            if version is not None and not _VERSION.fullmatch(version):
                self._refuse(f"gpus.{name}", f"it is not a version: {version!r:.80}")
        gpus = hardware.gpus.gpus
        for at, gpu in enumerate(gpus):
            key = f"gpus.gpus[{at}]"
            self._check_gpu(gpu, key)
            if gpu.mig_profile is None and any(same.uuid == gpu.uuid for same in gpus[:at]):
                self._refuse(f"{key}.uuid", f"another GPU has the same: {gpu.uuid}")
            if gpu.mig_profile is None and any(same.index == gpu.index for same in gpus[:at] if not same.mig_profile):
                self._refuse(f"{key}.index", f"another GPU has the same: {gpu.index}")
            if unknown := set(gpu.nvlink_peers) - {peer.index for peer in gpus if peer.index != gpu.index}:
                self._refuse(f"{key}.nvlink_peers", f"no other GPU has the index {min(unknown)}")

    def _check_gpu(self, gpu: Gpu, key: str) -> None:
        self._check_most(f"{key}.vram_free_mib", gpu.vram_free_mib, f"{key}.vram_total_mib", gpu.vram_total_mib)
        if gpu.is_unified and gpu.vram_total_mib is not None:
            self._refuse(
                f"{key}.is_unified",
                f"true, but vram_total_mib is {gpu.vram_total_mib:,}: such a GPU has none",
            )
        if gpu.sm is not None and not _SM.fullmatch(gpu.sm):
            self._refuse(f"{key}.sm", f"it is not a compute capability: {gpu.sm!r}; 90 means 9.0")
        if gpu.mig_profile is not None and gpu.sm in _WITHOUT_MIG:
            self._refuse(f"{key}.mig_profile", f"compute capability {gpu.sm} does not support MIG: {gpu.mig_profile}")
        for name, lanes in (("pcie_width", gpu.pcie_width), ("pcie_width_max", gpu.pcie_width_max)):
            if lanes is not None and lanes not in _LANES:
                self._refuse(f"{key}.{name}", f"no PCIe link has {lanes} lanes, only {', '.join(map(str, _LANES))}")

    def _check_groups(self, cpu: Cpu) -> None:
        """Check that groups cover all cores, or that there are none: a core without a capacity has no speed."""
        groups, cores = cpu.groups, cpu.physical or cpu.logical
        if groups and (told := sum(group.cores for group in groups)) != cores:
            self._refuse("cpu.groups", f"they have {told} cores, and the CPU has {cores}")
        for at, group in enumerate(groups):
            key = f"cpu.groups[{at}]"
            if group.capacity > 1:
                self._refuse(f"{key}.capacity", f"{group.capacity:g} is more than 1, the capacity of the fastest core")
            if at and group.capacity > groups[at - 1].capacity:
                self._refuse(f"{key}.capacity", "groups must be in order, the fastest first")
            if group.cpus and len(set(group.cpus)) < group.cores:
                self._refuse(f"{key}.cpus", f"{len(set(group.cpus))} CPUs are too few for {group.cores} cores")
        cpus = [each for group in groups for each in group.cpus]
        if twice := {each for each in cpus if cpus.count(each) > 1}:
            self._refuse("cpu.groups", f"CPU {min(twice)} is listed twice")

    def _check_numa(self, hardware: Hardware) -> None:
        """Check the nodes, which describe the whole machine; a container may use only a part of their CPUs."""
        nodes, seen = hardware.numa, set[int]()
        for at, node in enumerate(nodes):
            if any(other.id == node.id for other in nodes[:at]):
                self._refuse(f"numa[{at}].id", f"another node has the same: {node.id}")
            if twice := seen.intersection(node.cpus):
                self._refuse(f"numa[{at}].cpus", f"another node has CPU {min(twice)}")
            seen.update(node.cpus)
        if 0 < len(seen) < hardware.cpu.logical:
            self._refuse("numa", f"its nodes have {len(seen)} CPUs, and cpu.logical is {hardware.cpu.logical}")
        ids = {node.id for node in nodes}
        for at, gpu in enumerate(hardware.gpus.gpus):
            if nodes and gpu.numa_node is not None and gpu.numa_node not in ids:
                self._refuse(f"gpus.gpus[{at}].numa_node", f"no node has the id {gpu.numa_node}")

    def _check_most(self, key: str, value: int | None, of: str, most: int | None) -> None:
        if value is not None and most is not None and value > most:
            self._refuse(key, f"{value:,} is more than {of}, {most:,}")


def _json(text: str) -> object:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            message = f"a key is listed twice: {next(name for name in names if names.count(name) > 1)}"
            raise ValueError(message)
        return found

    return json.loads(text, object_pairs_hook=once)


def _default(field: Any) -> object:  # noqa: ANN401 - generic in its type
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return list(value) if isinstance(value, tuple) else value


def _dataclass_in(hint: Any) -> type | None:  # noqa: ANN401
    """Return the dataclass that a field holds, once or several times; None for plain values."""
    kinds = (hint, *get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")), None)


def _is_many(hint: Any) -> bool:  # noqa: ANN401
    return Ellipsis in get_args(hint)


def _named_apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each GPU without a uuid a made-up one: plans identify a GPU by it."""
    for at, row in enumerate(rows):
        if row["uuid"] is None:
            row["uuid"] = f"{'MIG' if row['mig_profile'] else 'GPU'}-{at}"
    return rows


def _with_own_speeds(hardware: Hardware) -> Hardware:
    """Assign measured speeds to GPUs by order if a bundle hides the uuids, by which they are stored."""
    speeds, gpus = hardware.speeds, hardware.gpus.gpus
    if speeds is None or len(speeds.gpus) != len(gpus) or any(speed.uuid != HIDDEN for speed in speeds.gpus):
        return hardware
    named = tuple(replace(speed, uuid=gpu.uuid or HIDDEN) for speed, gpu in zip(speeds.gpus, gpus, strict=True))
    return replace(hardware, speeds=replace(speeds, gpus=named))


def _volume(given: Mapping[str, Any]) -> Volume:
    """Build the Volume. Raises ValueError."""
    if not isinstance(given["path"], str) or not isinstance(given["is_writable"], bool):
        message = "volume: path must be a string, is_writable true or false"
        raise ValueError(message)
    for name in ("free_mib", "total_mib"):
        if type(given[name]) not in (int, type(None)):
            message = f"volume.{name}: it is not a whole number: {given[name]!r:.40}"
            raise ValueError(message)
    return Volume(**{**given, "path": Path(given["path"])})


def _numbers(value: object, key: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _numbers(each, _join(key, str(name)))
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from _numbers(each, f"{key}[{at}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _key_first(words: str) -> str:
    """Move the key of a msgspec message to its front: "Hardware: Expected `int`, got `str` - at `$.cpu.logical`"."""
    found = re.fullmatch(r"(?:\w+: )?(.*?) - at `\$\.?(.*)`", words)
    return f"{found[2]}: {found[1][:1].lower()}{found[1][1:]}" if found else words
