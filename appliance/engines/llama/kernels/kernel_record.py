"""What was seen of the engine's CPU kernels, on the volume: variants that failed here, and what was checked.

One file for each CPU in the folder of a build's caches: what another build or another CPU did says nothing. Written
whole and renamed; two containers that write at once may lose one's news, which is then found out again.
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
MAX_BYTES = 2**20  # ours are under 10 KB


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A check that found nothing wrong with a variant. `problem` is why it found out nothing at all."""

    asked: Asked
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """By the variant's name. `ruled_out` is what was seen of it."""

    ruled_out: Mapping[str, str] = field(default_factory=dict)
    checked: Mapping[str, Checked] = field(default_factory=dict)

    def check_of(self, variant: str, asked: Asked) -> Checked | None:
        """The one that covers this."""
        found = self.checked.get(variant)
        return found if found is not None and found.asked.holds(asked) else None


def identity(cpu: Cpu) -> dict[str, Any]:
    """Flags are those that kernels are chosen by: the rest changes with the kernel of the host."""
    found = {"vendor": cpu.vendor, "stepping": cpu.stepping, "model_name": cpu.model_name, "flags": list(cpu.isa)}
    return dict(sorted(found.items()))


class KernelStore:
    """Of one CPU and one build. Reading raises nothing: a file that cannot be read is no reason not to serve."""

    def __init__(self, cache_dir: Path, build_id: str, cpu: Cpu, warn: Callable[[str], None] = lambda _: None) -> None:
        """`cache_dir` is the build's own folder."""
        self._owner = {"build": build_id, "cpu": identity(cpu)}
        name = hashlib.sha256(json.dumps(self._owner, sort_keys=True).encode()).hexdigest()[:16]
        self.path = cache_dir / f"cpu-kernels-{name}.json"
        self._warn = warn
        self._disk = Disk()

    def load(self, *, may_set_aside: bool = True) -> Record:
        """Nothing where there is no file. A damaged one is set aside, and one of another build or CPU ignored."""
        try:
            data = self._disk.read(self.path, MAX_BYTES)
        except FileNotFoundError:
            return Record()
        except OSError as error:
            self._warn(f"what is known of the CPU's kernels cannot be read: {self.path}: {_words(error)}")
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
        """What is known now; told by a warning where the volume does not take it."""
        record = self.load()
        return self._save(replace(record, ruled_out={**record.ruled_out, variant: seen}))

    def note(self, variant: str, checked: Checked) -> Record:
        """Beside what was checked before, unless one of the two found out nothing."""
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
            self._warn(f"what was seen of the CPU's kernels cannot be kept: {self.path}: {_words(error)}")
        return record

    def _set_aside(self, why: str) -> None:
        aside = self.path.with_suffix(".corrupt")
        try:
            self._disk.rename(self.path, aside)
        except OSError as error:
            self._warn(f"what is known of the CPU's kernels is damaged and stays: {self.path}: {_words(error)}")
            return
        self._warn(f"what was known of the CPU's kernels is damaged ({why}): set aside as {aside.name}")


def _parse(data: bytes, owner: Mapping[str, Any]) -> Record:
    """Raises ValueError for a damaged document."""
    if len(data) >= MAX_BYTES:
        message = f"longer than {MAX_BYTES:,} bytes"
        raise ValueError(message)
    document = load(data)
    schema = document.pop("schema", None)
    theirs = {name: document.pop(name) for name in owner if name in document}
    is_whole = schema is not None and (schema != SCHEMA or theirs.keys() == owner.keys())
    if is_whole and (schema, theirs) != (SCHEMA, owner):
        return Record()  # an appliance of another schema may come back; a foreign file says nothing of this CPU
    if not is_whole:
        message = "it does not say what it is of"
        raise ValueError(message)
    return read(Record, document)


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
