"""Names that people use for a model, and the variants of a recipe that they mean. Pure; standard library only.

`Qwen3-30B-A3B`, `qwen3:30b-a3b` and `qwen/qwen3-30b-a3b` are one model: case and separators have no meaning.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Sequence

from appliance.values import dataclass

_TOKEN = re.compile(r"[a-z]+|\d+")
# A word ends at a separator, and before the number after a family's name: qwen3, gemma-4. A version is one word.
_WORD = re.compile(r"[a-z]{2,}(?=\d)|\d+\.\d+[a-z]*|[a-z0-9]+")
_ENDS = re.compile(r"(?:-\d{5}-of-\d{5})?(?:[.-]gguf)?(?::latest)?$", re.IGNORECASE)
# after `vendor/` this marks a repository or one of its files
_NOT_A_NAME = re.compile(r"[:@]|[.-]gguf$", re.IGNORECASE)
_BETWEEN_NUMBERS = re.compile(r"(?<=\d) (?=\d)")
_NEAR = 3


@dataclass(frozen=True, kw_only=True)
class NamedRung:
    """Names of a variant. `published` holds the names of its repository and of its file."""

    name: str
    published: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NamedRecipe:
    """Names of a recipe. `vendors` are the organisations that publish its models, in lower case."""

    name: str
    vendors: tuple[str, ...]
    rungs: tuple[NamedRung, ...]


@dataclass(frozen=True, kw_only=True)
class Meant:
    """What a name means. `rung` is a variant's name, or the beginning that several have in common; "" leaves the choice
    to the recipe."""

    recipe: str
    rung: str

    @property
    def words(self) -> str:
        return f"{self.recipe}:{self.rung}" if self.rung else self.recipe


def resolve(called: str, recipes: Sequence[NamedRecipe]) -> Meant | None:
    """Return what a name means. None if it names no recipe, or if it names a repository, a file or an address.

    A vendor before the name must be one of the recipe's: another vendor's model of the same name is another model.
    """
    vendor, slash, name = called.rpartition("/")
    if slash and ("/" in vendor or _NOT_A_NAME.search(name)):
        return None
    fitting = [each for each in recipes if not slash or vendor.casefold() in each.vendors]
    for recipe in fitting:
        if name_key(name) == name_key(recipe.name):
            return Meant(recipe=recipe.name, rung="")
    for is_meant in _WAYS:
        for recipe in fitting:
            if found := _found(name, recipe, is_meant):
                return Meant(recipe=recipe.name, rung=_common(found, recipe))
    return None


def rungs_named(called: str, recipe: NamedRecipe) -> tuple[str, ...]:
    """Return the names of all variants that a name means; empty if it means none of this recipe."""
    return next((found for is_meant in _WAYS if (found := _found(called, recipe, is_meant))), ())


def nearest(called: str, recipes: Sequence[NamedRecipe]) -> tuple[str, ...]:
    """Return the known names that are closest to an unknown one, each as it can be typed."""
    names = {name_key(each.name): each.name for each in recipes}
    for recipe in recipes:
        for rung in recipe.rungs:
            for name in rung.published[:1]:
                names.setdefault(name_key(name), _ENDS.sub("", name))
    near = difflib.get_close_matches(name_key(called.rpartition("/")[2]), names, _NEAR, cutoff=0.7)
    return tuple(names[key] for key in near)


def name_key(called: str) -> str:
    """Return the same text for all spellings of a name: `Qwen3-8B`, `qwen3:8b`, `qwen3 8b`."""
    return _joined(_tokens(called))


def _found(called: str, recipe: NamedRecipe, is_meant: Callable[[str, str], bool]) -> tuple[str, ...]:
    rungs = {rung.name: (f"{recipe.name}:{rung.name}", *rung.published) for rung in recipe.rungs}
    return tuple(rung for rung, names in rungs.items() if any(is_meant(called, each) for each in names))


def _is_it(called: str, name: str) -> bool:
    return name_key(called) == name_key(name)


def _begins(called: str, name: str) -> bool:
    """True if `name` begins with `called` and continues with another word or number: qwen3-3 does not begin
    qwen3-32b."""
    tokens = _tokens(name)
    return name_key(called) in {_joined(tokens[:count]) for count in range(1, len(tokens))}


def _has_words_of(called: str, name: str) -> bool:
    """True if `name` contains all words of `called` in their order, the family first: qwen3-30b-2507 leaves out a3b."""
    words, there = _words(called), iter(_words(name))
    return len(words) > 1 and words[0] == _words(name)[0] and all(word in there for word in words)


_WAYS = (_is_it, _begins, _has_words_of)  # tried in this order; the first that finds a variant decides


def _common(found: Sequence[str], recipe: NamedRecipe) -> str:
    """Return the only name, or the first words that all names share; "" if the names are all variants of the recipe."""
    if len(found) == len(recipe.rungs):
        return ""
    columns = zip(*(name.split("-") for name in found), strict=False)
    return "-".join(words[0] for words in itertools.takewhile(lambda words: len(set(words)) == 1, columns))


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(_ENDS.sub("", text).casefold())


def _joined(tokens: Sequence[str]) -> str:
    """Join tokens, with a dot between two numbers so that 3.5-9b differs from 35-9b."""
    return _BETWEEN_NUMBERS.sub(".", " ".join(tokens)).replace(" ", "")


def _words(text: str) -> list[str]:
    return _WORD.findall(_ENDS.sub("", text).casefold())
