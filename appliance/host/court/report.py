"""The finding as a table, as a document, and as a file on the volume."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import Any

from docker.api import APIClient
from docker.errors import APIError, NotFound

from appliance.documents import load
from appliance.errors import VolumeError
from appliance.host.court.hearing import Finding
from appliance.host.court.judge import Slowdown, Verdict
from appliance.host.docker.launch import DATA
from appliance.values import dataclass

FOLDER = "court"


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finding with what was compared. Times are ISO 8601, UTC."""

    old_image: str
    new_image: str
    created: str
    ended: str
    finding: Finding

    def document(self) -> dict[str, Any]:
        finding = self.finding
        verdicts = {
            "speeds": finding.speeds.verdict,
            "memory": finding.memory.verdict,
            "answers": finding.answers.verdict,
            "rows": finding.rows.verdict,
        }
        return {
            **asdict(self),
            "verdict": finding.verdict,
            "why": finding.speeds.why,
            "verdicts": verdicts,
        }

    def lines(self) -> Iterator[str]:
        """Yield the table, and below it what was done."""
        rows = [
            *_speed_rows(self.finding),
            _memory_row(self.finding),
            _answers_row(self.finding),
            _rows_row(self.finding),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        yield from (f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows)
        way = "both loaded" if self.finding.together else "one loaded at a time"
        yield f"  work: {self.finding.mix}; {self.finding.speeds.pairs} pairs in {self.finding.seconds:.0f} s, {way}"


def _speed_rows(finding: Finding) -> Iterator[tuple[str, str, str]]:
    for each in finding.speeds.slowdowns:
        yield each.what, _in_words(each), each.verdict
    if why := finding.speeds.why:
        yield "speed", why, Verdict.NOT_DECIDED


def _in_words(each: Slowdown) -> str:
    word = "slower" if each.share > 0 else "faster"
    return f"{abs(each.share):.1%} {word} ({each.low:+.1%} to {each.high:+.1%} of the time)"


def _memory_row(finding: Finding) -> tuple[str, str, str]:
    found = finding.memory
    held = f"{_mib(found.old_mib)} -> {_mib(found.new_mib)}"
    return "memory", f"{held}, context {found.old_context or 0:,} -> {found.new_context or 0:,}", found.verdict


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f} MiB"


def _answers_row(finding: Finding) -> tuple[str, str, str]:
    found = finding.answers
    if found.why_not:
        return "answers", found.why_not, found.verdict
    mean = "no common token" if found.mean_nats is None else f"logprobs differ by {found.mean_nats:.3f}"
    return "answers", f"{found.same} of {found.prompts} the same, {found.clear} clearly others, {mean}", found.verdict


def _rows_row(finding: Finding) -> tuple[str, str, str]:
    found = finding.rows
    words = f"{found.compared - len(found.lost)} of {found.compared} that the old image has"
    return "abilities", words + (f"; lost: {', '.join(found.lost)}" if found.lost else ""), found.verdict


def keep(client: APIClient, container_id: str, record: Record, *, user: str) -> None:
    """Write the record to the volume through this container, as its user. Raises VolumeError."""
    data = (json.dumps(record.document(), indent=1) + "\n").encode()
    name = f"{FOLDER}/{record.created.replace(':', '')}.json"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(_owned(tarfile.TarInfo(FOLDER), user, is_folder=True))
        info = _owned(tarfile.TarInfo(name), user, is_folder=False)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    try:
        client.put_archive(container_id, DATA, out.getvalue())
    except APIError as error:
        message = f"the court's finding cannot be kept on the volume: {DATA}/{name}: {error.explanation or error}"
        raise VolumeError(message, hint="check the volume's space and owner") from error


def sessions(client: APIClient, container_id: str) -> list[tuple[float, float]]:
    """Return beginning and end of the sessions that the volume keeps, in seconds since 1970; files that are none are
    left out."""
    try:
        chunks, _ = client.get_archive(container_id, f"{DATA}/{FOLDER}")
    except NotFound:
        return []
    found: list[tuple[float, float]] = []
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        for member in tar:
            with suppress(ValueError, KeyError, TypeError):
                document = load(file.read()) if (file := tar.extractfile(member)) else {}
                created, ended = (datetime.fromisoformat(document[name]) for name in ("created", "ended"))
                found.append((created.timestamp(), ended.timestamp()))
    return found


def _owned(info: tarfile.TarInfo, user: str, *, is_folder: bool) -> tarfile.TarInfo:
    uid, _, gid = user.partition(":")
    info.uid, info.gid = (int(word) if word.isdecimal() else 0 for word in (uid, gid))
    info.type, info.mode = (tarfile.DIRTYPE, 0o775) if is_folder else (tarfile.REGTYPE, 0o664)
    info.mtime = int(time.time())
    return info
