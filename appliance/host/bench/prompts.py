"""Makes prompts of a wanted length that share no beginning, from a seed. Pure.

The endpoint's tokenizer is unknown: two requests with a known number of words show how many tokens a word takes.
"""

from __future__ import annotations

import random

from appliance.values import dataclass

ASKS = "\n\nContinue this list of words as a long story with many details. Do not stop early."
_WORDS = """
anchor apple arrow autumn barrel basket beacon bench bottle branch bridge bucket button cabin candle canvas carpet
castle cellar chain chalk cherry circle cliff clock cloud coast copper corner cotton cradle crystal curtain dawn
desert diamond dinner dragon drawer eagle echo engine evening fabric feather fence field finger flame flower forest
fountain garden gate glass glove grain granite harbor hammer harvest hazel helmet hill honey horse island ivory
jacket jewel journey kettle kitchen ladder lantern leather lemon letter library lighthouse linen lion lumber magnet
maple marble market meadow melody mirror morning mountain needle nickel night north ocean olive orange orchard
oyster paper pebble pencil pepper piano pillow planet pocket pottery powder prairie quarry quiet rabbit railway rain
raven ribbon river rocket rose saddle sailor salmon scarlet shadow shelter silver spider spring station stone storm
summer sunset table temple thunder timber tower tunnel valley velvet village violin voyage wagon walnut water whale
wheel willow window winter wolf wool yellow zebra
""".split()  # noqa: SIM905 - a list of words is read as one


@dataclass(frozen=True, kw_only=True)
class TokensPerWord:
    """tokens = `overhead` (chat template, instruction) + `slope` × words"""

    overhead: float
    slope: float

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.slope))


def calibrate(few: tuple[int, int], many: tuple[int, int]) -> TokensPerWord:
    """Return the relation from two pairs (words, tokens). Raises ValueError if more words do not give more tokens."""
    (words, tokens), (more_words, more_tokens) = few, many
    slope = (more_tokens - tokens) / (more_words - words)
    if slope <= 0:
        message = f"{words} words are {tokens} tokens, and {more_words} words are {more_tokens}"
        raise ValueError(message)
    return TokensPerWord(overhead=tokens - slope * words, slope=slope)


class Prompts:
    """Prompts of random words, different from the first word on, so that a prompt cache cannot help."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - no secret

    def make(self, words: int) -> str:
        number = self._random.randrange(10**9)  # in front of the words, since short prompts could begin alike by chance
        return f"{number}: {' '.join(self._random.choices(_WORDS, k=words))}{ASKS}"
