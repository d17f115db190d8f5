"""Remembers the beginnings of prompts as hashes, to know which part of a prompt had been read before.

A prompt here is a body from its first member on that a prompt is made of: SDKs write others before it, such as
`stream`, which change nothing in the cache.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from hashlib import blake2b

from appliance.values import dataclass

# The members of a body that a prompt is made of. In a text the quotes are escaped, so there it never matches.
_PARTS = re.compile(rb'"(?:messages|prompt|input|system|instructions|tools|functions|documents)"\s*:')
# Bytes of a prompt at which its beginning is remembered: each a quarter longer, so that most of a known part is found.
FIRST, STEP, MOST = 512, 1.25, 256 * 2**10
KEPT = 4096
_HASH_BYTES = 8


def _marks() -> tuple[int, ...]:
    found, at = [], float(FIRST)
    while at <= MOST:
        found.append(int(at))
        at *= STEP
    return tuple(found)


MARKS = _marks()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine from its readiness on. `restarts` counts the deaths before it."""

    restarts: int
    number: int


class Prompts:
    """The latest beginnings of prompts, with the engine that read them. Only hashes are kept."""

    def __init__(self) -> None:
        self._read: OrderedDict[bytes, Engine] = OrderedDict()

    def find(self, hashes: list[bytes], length: int) -> tuple[float, Engine | None]:
        """Return the share of a prompt of `length` bytes that had been read before, 0 to 1, and the engine that read it
        last."""
        for mark, each in reversed(list(zip(MARKS, hashes, strict=False))):
            if (engine := self._read.get(each)) is not None:
                return min(1.0, mark / length), engine
        return 0.0, None

    def note(self, hashes: list[bytes], engine: Engine) -> None:
        """Remember a prompt that this engine has read."""
        for each in hashes:
            self._read[each] = engine
            self._read.move_to_end(each)
        while len(self._read) > KEPT:
            self._read.popitem(last=False)


def prompt_of(body: bytes) -> memoryview:
    """Return the body from its first part of the prompt on; the whole body if no part is found."""
    found = _PARTS.search(body, 0, MOST)
    return memoryview(body)[found.start() if found else 0 :]


def hashes_of(prompt: bytes | memoryview) -> list[bytes]:
    """Return the hash at each of `MARKS` up to the prompt's length, and that of the whole prompt if it is not too
    long."""
    digest, found, at = blake2b(digest_size=_HASH_BYTES), [], 0
    for mark in MARKS:
        if mark > len(prompt):
            if at:  # a prompt below the first mark is too short to matter
                digest.update(prompt[at:])
                found.append(digest.copy().digest())
            break
        digest.update(prompt[at:mark])
        found.append(digest.copy().digest())
        at = mark
    return found
