"""The record of the engine's CPU kernels on the volume: variants that failed on this CPU, and checks that were done.

There is one file for each CPU in the folder of a build's caches, because results of another build or CPU do not apply.
The file is written whole and renamed. If two containers write at the same time, one result may be lost; the check is
then repeated.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.documents import load, read
from appliance.engines.llama.kernels.kernels import Asked
from appliance.plan import RuledOut
from appliance.probe import Cpu
from appliance.system.disk import Disk, put_file

SCHEMA = 1
MAX_BYTES = 2**20  # real records are under 10 KB


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A check of a variant that found no wrong kernel."""

    asked: Asked
    problem: str | None = None  # why the check was inconclusive; None: the kernels are correct


@dataclass(frozen=True, kw_only=True)
class Record:
    """Results of one CPU and build, by the variant's name."""

    ruled_out: Mapping[str, str] = field(default_factory=dict)  # how the variant failed
    checked: Mapping[str, Checked] = field(default_factory=dict)

    def check_of(self, variant: str, asked: Asked) -> Checked | None:
        """Return the check that covers all types in `asked`; None if there is none."""
        found = self.checked.get(variant)
        return found if found is not None and found.asked.holds(asked) else None


def identity(cpu: Cpu) -> dict[str, Any]:
    """Return the facts that identify a CPU. Only flags that kernels are chosen by: others change with the host's OS."""
    found = {"vendor": cpu.vendor, "stepping": cpu.stepping, "model_name": cpu.model_name, "flags": list(cpu.isa)}
    return dict(sorted(found.items()))


class KernelStore:
    """Reads and writes the record of one CPU and build. File errors are warnings, because a start can serve without."""

    def __init__(self, cache_dir: Path, build_id: str, cpu: Cpu, warn: Callable[[str], None] = lambda _: None) -> None:
        """`cache_dir` is the cache folder of this build, `warn` is called with each file error."""
        self._owner = {"build": build_id, "cpu": identity(cpu)}
        name = hashlib.sha256(json.dumps(self._owner, sort_keys=True).encode()).hexdigest()[:16]
        self.path = cache_dir / f"cpu-kernels-{name}.json"
        self._warn = warn
        self._disk = Disk()

    def load(self, *, may_set_aside: bool = True) -> Record:
        """Return the record; empty if there is no file. A damaged file is set aside, a foreign one is ignored."""
        try:
            data = self._disk.read(self.path, MAX_BYTES)
        except FileNotFoundError:
            return Record()
        except OSError as error:
            self._warn(f"record of CPU kernel checks cannot be read: {self.path}: {_words(error)}")
            return Record()
        try:
            return _parse(data, self._owner)
        except ValueError as error:
            if may_set_aside:
                self._set_aside(f"{type(error).__name__}: {error}"[:200])
            return Record()

    def ruled_out(self, record: Record) -> RuledOut:
        good = frozenset(name for name, checked in record.checked.items() if checked.problem is None)
        return RuledOut(seen=record.ruled_out, where=str(self.path), checked=good)

    def rule_out(self, variant: str, seen: str) -> Record:
        """Add a failed variant and return the new record. If the file cannot be written, `warn` is called."""
        record = self.load()
        return self._save(replace(record, ruled_out={**record.ruled_out, variant: seen}))

    def note(self, variant: str, checked: Checked) -> Record:
        """Add a check result; it is merged with the previous one if both were conclusive. Returns the new record."""
        record = self.load()
        before = record.checked.get(variant)
        if before is not None and before.problem is None and checked.problem is None:
            checked = replace(checked, asked=before.asked.with_more(checked.asked))
        return self._save(replace(record, checked={**record.checked, variant: checked}))

    def _save(self, record: Record) -> Record:
        rows = {
            "ruled_out": dict(record.ruled_out),
            "checked": {name: asdict(checked) for name, checked in record.checked.items()},
        }
        text = json.dumps({"schema": SCHEMA, **self._owner, **rows}, indent=1, sort_keys=True) + "\n"
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.tmp")
        try:
            put_file(self._disk, self.path, text.encode(), temporary=temporary, modified_ns=time.time_ns())
        except OSError as error:
            self._warn(f"record of CPU kernel checks cannot be kept: {self.path}: {_words(error)}")
        return record

    def _set_aside(self, why: str) -> None:
        aside = self.path.with_suffix(".corrupt")
        try:
            self._disk.rename(self.path, aside)
        except OSError as error:
            words = f"record of CPU kernel checks is damaged and cannot be renamed: {self.path}: {_words(error)}"
            self._warn(words)
            return
        self._warn(f"record of CPU kernel checks is damaged ({why}): renamed to {aside.name}")


def _parse(data: bytes, owner: Mapping[str, Any]) -> Record:
    """Return the record in a file; empty if it has another schema or owner. Raises ValueError if it is damaged."""
    if len(data) >= MAX_BYTES:
        message = f"longer than {MAX_BYTES:,} bytes"
        raise ValueError(message)
    document = load(data)
    schema = document.pop("schema", None)
    theirs = {name: document.pop(name) for name in owner if name in document}
    is_whole = schema is not None and (schema != SCHEMA or theirs.keys() == owner.keys())
    if is_whole and (schema, theirs) != (SCHEMA, owner):
        return Record()  # not set aside: an appliance with the other schema may be started again
    if not is_whole:
        message = "it names no build and CPU"
        raise ValueError(message)
    return read(Record, document)


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
