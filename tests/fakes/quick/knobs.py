"""The part of `argparse` that the knobs of a fake need: a table of flags. A word that is no flag of it is ignored."""

from __future__ import annotations

from types import SimpleNamespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_MISSING = object()


class Knobs:
    """Flags with values, by `add_argument` as of argparse. Raises SystemExit(2) for a value that is none of a flag."""

    def __init__(self) -> None:
        self._flags: dict[str, _Flag] = {}

    def add_argument(self, *names: str, **words: Any) -> None:
        flag = _Flag(names[0].lstrip("-").replace("-", "_"), **words)
        self._flags.update(dict.fromkeys(names, flag))

    def parse(self, words: list[str]) -> SimpleNamespace:
        found = SimpleNamespace(**{flag.name: flag.initial() for flag in self._flags.values()})
        rest = list(words)
        while rest:
            word, equals, value = rest.pop(0).partition("=")
            flag = self._flags.get(word)
            if flag is None:
                continue
            if equals:
                rest.insert(0, value)
            flag.take(found, rest)
        return found


class _Flag:
    """One flag. `nargs` is "?" if its value may be missing, and `const` what it is then; "+" takes all up to a flag."""

    def __init__(
        self,
        name: str,
        *,
        type: Callable[[str], Any] = str,
        default: Any = None,
        action: str = "store",
        nargs: str = "",
        const: Any = None,
        choices: Any = None,
        metavar: str = "",
        help: str = "",
    ) -> None:
        self.name = name
        self.type, self.default, self.action, self.nargs, self.const = type, default, action, nargs, const
        self.choices = choices

    def initial(self) -> Any:
        if self.action == "append":
            return list(self.default)
        return False if self.action == "store_true" else self.default

    def take(self, found: SimpleNamespace, rest: list[str]) -> None:
        if self.action == "store_true":
            value: Any = True
        elif self.nargs == "+":
            value = list(self.values(rest))
        else:
            value = next(self.values(rest), _MISSING)
            value = self.const if value is _MISSING and self.nargs == "?" else value
        if value is _MISSING or (self.choices and value not in self.choices):
            raise SystemExit(2)
        if self.action == "append":
            getattr(found, self.name).append(value)
        else:
            setattr(found, self.name, value)

    def values(self, rest: list[str]) -> Iterator[Any]:
        while rest and not rest[0].startswith("--"):
            yield self.type(rest.pop(0))
