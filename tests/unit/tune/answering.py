"""A client of a known model, for the checks that compare answers."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.engines.engine import Completion


class Answering:
    """A client whose model is `answer`. A token of a prompt is a word."""

    async def tokenize(self, text: str, *, as_chat: bool = False) -> list[int]:
        assert as_chat
        return list(range(len(text.split())))

    async def complete(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        uses_cache: bool = True,
        slot: int | None = None,
        seed: int | None = None,
    ) -> Completion:
        del uses_cache, slot, seed
        made = await self.answer(prompt, tokens)
        return Completion(
            read=len(prompt),
            cached=0,
            made=tokens,
            tokens=tuple(made),
            prefill_ms=1.0,
            decode_ms=1.0,
            drafted=self.drafted(tokens),
        )

    async def answer(self, prompt: Sequence[int], tokens: int) -> Sequence[int]:
        """Return the tokens that follow."""
        return range(len(prompt), len(prompt) + tokens)

    def drafted(self, tokens: int) -> int:
        """Return how many of so many tokens were drafted."""
        del tokens
        return 0
