"""Results of the suite as data, and their JSON."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from appliance.documents import Rules, load, read
from appliance.values import dataclass

SUITE = 1  # number of the suite: results of another one do not count


class Result(StrEnum):
    """The result of one exchange."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_JUDGED = "not judged"  # this model's answer allows no judgement
    NOT_OFFERED = "not offered"  # the chat template has no notation for it, or a setting turned it off


_WORST_FIRST = (Result.FAILED, Result.NOT_JUDGED, Result.NOT_OFFERED, Result.PASSED)


@dataclass(frozen=True, kw_only=True)
class Ability:
    """Result of one row: of the whole answer and of the streamed one. `reason` is a sentence; empty if both passed."""

    name: str
    whole: Result
    streamed: Result
    reason: str = ""
    then: str = ""  # what the gateway does about it, or what a client may do; empty unless it failed

    @property
    def result(self) -> Result:
        """The worse of the two results."""
        return min(self.whole, self.streamed, key=_WORST_FIRST.index)

    def describe(self) -> str:
        words = f"{self.name}: {self.result}"
        if self.whole is not self.streamed:
            words = f"{self.name}: {self.whole}, {self.streamed} when streamed"
        return "; ".join(filter(None, (f"{words} ({self.reason})" if self.reason else words, self.then)))


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """All results so far. `of` is the digest of what they depend on: other digests make them void."""

    of: str
    rows: tuple[Ability, ...] = ()

    def by_name(self) -> dict[str, str]:
        return {row.name: str(row.result) for row in self.rows}

    def describe(self) -> str:
        """Return one line with the counts and the names of what failed."""
        count = Counter(row.result for row in self.rows)
        words = [f"{count[each]} {each}" for each in Result if count[each]]
        failed = ", ".join(row.name for row in self.rows if row.result is Result.FAILED)
        return ", ".join(words) + (f": {failed}" if failed else "")

    def lines(self) -> Iterator[str]:
        """Yield a line with the counts, and one for each row that failed."""
        yield f"abilities of this model here: {self.describe()}"
        yield from (f"  {row.describe()}" for row in self.rows if row.result is Result.FAILED)

    def as_document(self) -> dict[str, Any]:
        return {"summary": self.describe(), "rows": [{**asdict(row), "result": row.result} for row in self.rows]}


def digest_of(*parts: object) -> str:
    """Return a digest of everything that answers depend on, the suite itself included."""
    return hashlib.sha256(json.dumps([SUITE, *parts], default=str).encode()).hexdigest()[:16]


_RULES: Rules = {Ability: lambda row: bool(row.name)}


def dump_abilities(found: Abilities) -> str:
    return json.dumps(asdict(found), sort_keys=True)


def parse_abilities(data: bytes) -> Abilities:
    """Parse what `dump_abilities` wrote. Raises ValueError for anything else."""
    return read(Abilities, load(data.decode()), rules=_RULES)
