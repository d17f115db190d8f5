"""What was checked of a profile after it was filled: its speculative decoding, its context, and a soak."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from appliance.values import dataclass

SIGNIFICANT = 0.01  # one-sided: so many harmless kinds of speculative decoding may be refused
# Places of the needles. From the end on: prompts share their beginning up to the needle, so the engine reads 2.4 times
# the context, not 3.
NEEDLE_DEPTHS = (0.95, 0.50, 0.10)
NeedleVerdict = Literal["passed", "failed", "not judged"]
Verdict = Literal["open", "harmless", "refused", "asked for", "not checked"]


def sign_test(more: int, fewer: int) -> float:
    """Return the chance that `more` of all differing pairs, or even more of them, fall on one side by luck alone.

    This is McNemar's exact test: pairs that do not differ tell nothing.
    """
    pairs = more + fewer
    return math.fsum(math.comb(pairs, at) for at in range(more, pairs + 1)) / 2.0**pairs


@dataclass(frozen=True, kw_only=True)
class ComparedPrompt:
    """One prompt of the comparison. `answer` is the greedy answer without speculative decoding, as token ids.

    `again` and `speculating` are the numbers of the windows of `answer` that an engine continued with other tokens:
    a second one without speculative decoding, and one with it. None: not asked yet.
    """

    name: str
    answer: tuple[int, ...]
    again: tuple[int, ...] | None = None
    speculating: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculationCheck:
    """Comparison of greedy answers with and without speculative decoding. `of` is the kind, as its plan describes it.

    `plain_documents` and `documents` have one entry for each answer under a schema, True if it is valid: of the engine
    without speculative decoding, and of the one with it.
    """

    of: str
    window: int  # tokens that are continued from the same prefix
    kv_type: str = ""  # of the KV cache that the answers were made with
    prompts: tuple[ComparedPrompt, ...] = ()
    plain_documents: tuple[bool, ...] = ()
    documents: tuple[bool, ...] = ()
    is_answered: bool = False  # True once all prompts have an answer
    drafted: int = 0
    accepted: int = 0
    verdict: Verdict = "open"

    @property
    def windows(self) -> int:
        """Windows that were continued both ways."""
        return sum(len(each.answer) // self.window for each in self.prompts if each.speculating is not None)

    @property
    def differing(self) -> tuple[int, int]:
        """Windows that differ from the first answer: of a second engine without speculative decoding, and with it."""
        return sum(len(again) for again, _ in self._pairs), sum(len(speculating) for _, speculating in self._pairs)

    @property
    def only(self) -> tuple[int, int]:
        """Windows that differ in one of the two runs only: without speculative decoding, and with it."""
        return sum(len(one - two) for one, two in self._pairs), sum(len(two - one) for one, two in self._pairs)

    @property
    def _pairs(self) -> list[tuple[set[int], set[int]]]:
        done = [each for each in self.prompts if each.speculating is not None]
        return [({*(each.again or ())}, {*(each.speculating or ())}) for each in done]

    @property
    def chance(self) -> float:
        """Chance of such an excess of differences if speculative decoding is harmless."""
        without, with_it = self.only
        return sign_test(with_it, without)

    @property
    def broken_documents(self) -> int:
        """Answers that are invalid with speculative decoding, and valid without."""
        return sum(plain and not each for plain, each in zip(self.plain_documents, self.documents, strict=False))

    def judged(self, *, is_asked_for: bool) -> SpeculationCheck:
        """Return the check with its verdict. What the user asked for by a setting is never refused.

        Without a window to compare nothing is known: no prompt fits the context, or the engine gives no token ids.
        """
        if not self.windows:
            return replace(self, verdict="not checked")
        is_harmless = self.chance >= SIGNIFICANT and not self.broken_documents
        return replace(self, verdict="harmless" if is_harmless else "asked for" if is_asked_for else "refused")

    def describe(self) -> str:
        again, speculating = self.differing
        only_again, only_speculating = self.only
        figures = (
            f"{speculating} of {self.windows} windows of {self.window} tokens differ with it, {again} without it, "
            f"{only_speculating} and {only_again} of them only there (chance {self.chance:.2g}); "
            f"{self.broken_documents} of {len(self.documents)} documents broken; "
            f"{self.accepted:,} of {self.drafted:,} draft tokens accepted"
        )
        words = {
            "open": f"{self.of}: not compared to the end",
            "harmless": f"{self.of} does not change greedy answers",
            "refused": f"{self.of} is refused, since it changes greedy answers",
            "not checked": f"{self.of}: not checked, since no answer has tokens to compare",
            "asked for": f"{self.of} changes greedy answers; it serves, since a setting asks for it",
        }
        return f"{words[self.verdict]}: {figures}"


@dataclass(frozen=True, kw_only=True)
class CachePrompt:
    """One prompt of the comparison of KV caches. `answer` is the greedy answer with an exact cache, as token ids.

    `likely` has the likely tokens with their log probability at the beginning of each window of the answer, and `nats`
    is what they moved by with the quantized cache. None: not asked yet.
    """

    name: str
    answer: tuple[int, ...]
    likely: tuple[tuple[tuple[int, float], ...], ...]
    nats: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class CacheCheck:
    """Comparison of a quantized KV cache with an exact one. `mean` is what the probabilities of tokens moved by, in
    nats per token, and `high` the upper end of its 95 % interval."""

    kv_type: str
    prompts: tuple[CachePrompt, ...] = ()  # empty once it is judged
    is_answered: bool = False  # True once all prompts have an answer
    verdict: Verdict = "open"
    positions: int = 0
    mean: float = 0.0
    high: float = 0.0
    limit: float = 0.0

    def describe(self) -> str:
        if self.verdict == "open":
            return f"{self.kv_type}: not compared to the end"
        if self.verdict == "not checked":
            return f"{self.kv_type} is refused: not checked, since too few answers could be compared"
        words = "is harmless" if self.verdict == "harmless" else "is refused, since it changes answers"
        figures = f"{self.mean:.4f} nats a token over {self.positions:,} positions, at most {self.high:.4f} with 95 %"
        return f"{self.kv_type} {words}: probabilities move by {figures}; the limit is {self.limit:.4f}"


@dataclass(frozen=True, kw_only=True)
class NeedleRow:
    """One needle in a context. `share` is its place: 0 at the beginning, 1 at the end."""

    context: int  # tokens of the prompt
    share: float
    verdict: NeedleVerdict
    words: str
    kv_type: str = ""  # of the cache that the text was read into


@dataclass(frozen=True, kw_only=True)
class SoakCount:
    """Requests of the soak so far. `errors` has the distinct ones in words, at most a few of them."""

    seconds: float = 0.0
    answers: int = 0
    failed: int = 0
    errors: tuple[str, ...] = ()

    def describe(self) -> str:
        told = f": {'; '.join(self.errors)}" if self.errors else ""
        return f"{self.failed} of {self.answers:,} answers failed in {self.seconds / 60:.1f} min{told}"


@dataclass(frozen=True, kw_only=True)
class Checks:
    """All checks of one profile."""

    speculation: SpeculationCheck | None = None  # of the kind that the profile's plan has or had
    caches: tuple[CacheCheck, ...] = ()  # one for each type that the engine does not prove in another way
    needles: tuple[NeedleRow, ...] = ()
    soak: SoakCount | None = None

    def has_failed(self, context: int, kv_type: str) -> bool:
        """True if a needle was lost in this context, or in a shorter one, with this type of cache."""
        rows = (row for row in self.needles if row.kv_type == kv_type and row.context <= context)
        return any(row.verdict == "failed" for row in rows)

    def is_judged(self, context: int, kv_type: str) -> bool:
        """True if every needle in this context has a verdict."""
        return {row.share for row in self.needles_in(context, kv_type)} >= {*NEEDLE_DEPTHS}

    def needles_in(self, context: int, kv_type: str) -> tuple[NeedleRow, ...]:
        return tuple(row for row in self.needles if (row.context, row.kv_type) == (context, kv_type))

    def holding(self, kv_type: str) -> int | None:
        """Return the largest context in which needles were found and none was lost, None without one."""
        found = {row.context for row in self.needles if row.verdict == "passed" and row.kv_type == kv_type}
        whole = (context for context in found if self.is_judged(context, kv_type))
        return max((context for context in whole if not self.has_failed(context, kv_type)), default=None)

    def next_for_needles(self, context: int, least: int, kv_type: str) -> int | None:
        """Return the context in which needles are looked for next: `context`, and while one loses a needle the next
        smaller power of two, down to `least`. None if a context holds, or if none is left."""
        while self.is_judged(context, kv_type) and self.has_failed(context, kv_type):
            context = 1 << (context - 1).bit_length() - 1
            if context < least:
                return None
        return None if self.is_judged(context, kv_type) else context

    def with_needle(self, row: NeedleRow) -> Checks:
        key = (row.context, row.share, row.kv_type)
        others = (each for each in self.needles if (each.context, each.share, each.kv_type) != key)
        return replace(self, needles=tuple(sorted((*others, row), key=lambda each: (each.context, each.share))))

    def cache(self, kv_type: str) -> CacheCheck:
        """Return the comparison of this type so far."""
        return next((each for each in self.caches if each.kv_type == kv_type), CacheCheck(kv_type=kv_type))

    def refuses(self, kv_type: str) -> bool:
        """True if this type of cache must not serve: it changes answers, or it could not be compared."""
        return self.cache(kv_type).verdict in ("refused", "not checked")

    def refuses_speculation(self, kind: str) -> bool:
        """True if this kind of speculative decoding, as its plan describes it, changes answers."""
        found = self.speculation
        return found is not None and (found.of, found.verdict) == (kind, "refused")

    def with_cache(self, check: CacheCheck) -> Checks:
        others = (each for each in self.caches if each.kv_type != check.kv_type)
        return replace(self, caches=tuple(sorted((*others, check), key=lambda each: each.kv_type)))

    def lines(self) -> Iterator[str]:
        """Yield a line for each check."""
        if self.speculation:
            yield f"speculative decoding: {self.speculation.describe()}"
        yield from (f"KV cache: {check.describe()}" for check in self.caches)
        for context, kv_type in sorted({(row.context, row.kv_type) for row in self.needles}):
            rows = self.needles_in(context, kv_type)
            words = ", ".join(f"{row.verdict} at {row.share:.0%}" for row in rows)
            fails = any(row.verdict == "failed" for row in rows)
            held = self.holding(kv_type)
            holds = f"{held:,} tokens do" if held else "use a smaller --ctx-size"
            then = f"; this context does not hold: {holds}" if fails else ""
            of = f" ({kv_type})" if kv_type else ""
            yield f"needles in {context:,} tokens{of}: {words}{then}"
        if self.soak:
            yield f"soak with tools: {self.soak.describe()}"

    def as_document(self) -> dict[str, object] | None:
        """Return what status and `plan` show, None if nothing was checked yet. The compared tokens are left out."""
        if not (lines := list(self.lines())):
            return None
        check, soak = self.speculation, self.soak
        return {
            "lines": lines,
            "speculation": None
            if check is None
            else {
                "of": check.of,
                "verdict": check.verdict,
                "windows": check.windows,
                "window": check.window,
                "differing_again": check.differing[0],
                "differing": check.differing[1],
                "only_again": check.only[0],
                "only_speculating": check.only[1],
                "chance": round(check.chance, 6),
                "documents": len(check.documents),
                "broken_documents": check.broken_documents,
                "drafted": check.drafted,
                "accepted": check.accepted,
            },
            "caches": [
                {
                    "kv_type": each.kv_type,
                    "verdict": each.verdict,
                    "positions": each.positions,
                    "mean_nats": round(each.mean, 6),
                    "high_nats": round(each.high, 6),
                    "limit_nats": round(each.limit, 6),
                }
                for each in self.caches
            ],
            "needles": [
                {
                    "context": row.context,
                    "share": row.share,
                    "verdict": row.verdict,
                    "words": row.words,
                    "kv_type": row.kv_type,
                }
                for row in self.needles
            ],
            "soak": soak
            and {
                "seconds": round(soak.seconds, 1),
                "answers": soak.answers,
                "failed": soak.failed,
                "errors": list(soak.errors),
            },
        }
