"""What the channel should be, and what has to change for it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from appliance.errors import ConfigError
from appliance.values import dataclass

OPENAI = 1  # its URL is the base and the request's path; the only kind of channel that every version and fork has
ENABLED, DISABLED_BY_HAND, DISABLED_BY_ITSELF = 1, 2, 3
NO_KEY = "none"  # an empty key would be no channel at all


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """`base_url` without /v1 and without a slash at its end: the relay puts the path behind it as it is."""

    name: str
    base_url: str
    models: tuple[str, ...]
    context: int | None
    key: str = field(repr=False)

    def fields(self) -> dict[str, Any]:
        """All that can be read back. `other` means nothing to a channel of this type."""
        return {
            "name": self.name,
            "type": OPENAI,
            "base_url": self.base_url,
            "models": ",".join(self.models),
            "other": self.note,
        }

    @property
    def note(self) -> str:
        """The context, which a channel has no field for, and by what another key is known: keys are never read back."""
        context = f"context {self.context}" if self.context else "context unknown"
        return f"appliance: {context}, key {hashlib.sha256(self.key.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """`fields` to write: of all, where there is no channel yet. Empty: it is as it should be."""

    id: int | None
    fields: Mapping[str, Any]
    enables: bool = False
    is_disabled_by_hand: bool = False
    was: Mapping[str, Any] = field(default_factory=dict)


def changed(wanted: Wanted, channels: Sequence[Mapping[str, Any]]) -> Change:
    """`channels`: those of the wanted name. ConfigError where there are several: which one is meant, nobody knows."""
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
    """ConfigError where there is more than one. `rows` is not empty."""
    if len(rows) > 1:
        numbers = ", ".join(sorted(str(row.get("id")) for row in rows))
        message = f"there are {len(rows)} {what}s of the name '{name}': ids {numbers}"
        raise ConfigError(message, hint=f"delete all but one, or take another name with --{what} NAME")
    return rows[0]


def check_models(models: Sequence[str]) -> tuple[str, ...]:
    """ConfigError for a name that a list with commas cannot hold."""
    for name in models:
        if "," in name or name != name.strip() or not name:
            message = f"the appliance's model has a name that a channel cannot hold: '{name}'"
            raise ConfigError(message, hint="name it with APPLIANCE_ALIAS, without commas")
    return tuple(dict.fromkeys(models))
