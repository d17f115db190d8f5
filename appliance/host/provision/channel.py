"""The wanted channel and the changes that lead to it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from appliance.errors import ConfigError
from appliance.values import dataclass

OPENAI = 1  # request URL: the base plus the request's path; the only channel type that every version and fork has
ENABLED, DISABLED_BY_HAND, DISABLED_BY_ITSELF = 1, 2, 3
NO_KEY = "none"  # a channel needs a key that is not empty


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The wanted channel. `base_url` has no /v1 and no slash at its end, since the relay appends the path unchanged."""

    name: str
    base_url: str
    models: tuple[str, ...]
    context: int | None
    key: str = field(repr=False)

    def fields(self) -> dict[str, Any]:
        """Return all fields that can be read back. `other` has no meaning for a channel of this type, so it holds our
        note."""
        return {
            "name": self.name,
            "type": OPENAI,
            "base_url": self.base_url,
            "models": ",".join(self.models),
            "other": self.note,
        }

    @property
    def note(self) -> str:
        """The context length, for which a channel has no field, and a hash that shows a changed key: keys are never
        read back."""
        context = f"context {self.context}" if self.context else "context unknown"
        return f"appliance: {context}, key {hashlib.sha256(self.key.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change to a channel. `fields` are written; they are all fields if there is no channel yet, and empty if
    nothing differs."""

    id: int | None
    fields: Mapping[str, Any]
    enables: bool = False
    is_disabled_by_hand: bool = False
    was: Mapping[str, Any] = field(default_factory=dict)


def changed(wanted: Wanted, channels: Sequence[Mapping[str, Any]]) -> Change:
    """Return the change that leads to the wanted channel. `channels` are those of its name. Raises ConfigError if the
    name is ambiguous."""
    if not channels:
        new = {"status": ENABLED, "group": "default", "priority": 0, "weight": 0, "model_mapping": ""}
        return Change(id=None, fields={**wanted.fields(), **new, "key": wanted.key or NO_KEY})
    found = only(channels, "channel", wanted.name)
    fields = {name: value for name, value in wanted.fields().items() if (found.get(name) or "") != value}
    status = found.get("status")
    return Change(
        id=int(found["id"]),
        fields={**fields, "key": wanted.key or NO_KEY} if "other" in fields else fields,
        enables=status == DISABLED_BY_ITSELF,
        is_disabled_by_hand=status == DISABLED_BY_HAND,
        was={name: found.get(name) for name in fields},
    )


def only(rows: Sequence[Mapping[str, Any]], what: str, name: str) -> Mapping[str, Any]:
    """Return the only row; `rows` is not empty. Raises ConfigError if there are several."""
    if len(rows) > 1:
        numbers = ", ".join(sorted(str(row.get("id")) for row in rows))
        message = f"there are {len(rows)} {what}s named '{name}': ids {numbers}"
        raise ConfigError(message, hint=f"delete all but one, or choose another name with --{what} NAME")
    return rows[0]


def check_models(models: Sequence[str]) -> tuple[str, ...]:
    """Return the names without duplicates. Raises ConfigError for a name that a list separated by commas cannot
    hold."""
    for name in models:
        if "," in name or name != name.strip() or not name:
            message = f"the model's name cannot be used in a channel: '{name}'"
            raise ConfigError(message, hint="name it with APPLIANCE_ALIAS, without commas")
    return tuple(dict.fromkeys(models))
