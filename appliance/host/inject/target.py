"""The values to enter in a tool's settings: an endpoint, a model, and the file that holds the key."""

from __future__ import annotations

from pathlib import Path

from appliance.host.docker.endpoint import Endpoint
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    endpoint: Endpoint
    model: str
    context: int | None  # tokens; None: unknown
    key_file: Path | None  # file that holds the key; None: the endpoint requires none

    @property
    def key(self) -> str | None:
        return self.endpoint.key


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders in which this user's tools keep their settings."""

    home: Path
    config: Path  # XDG_CONFIG_HOME, or ~/.config
    claude: Path  # CLAUDE_CONFIG_DIR, or ~/.claude
    continue_: Path  # CONTINUE_GLOBAL_DIR, or ~/.continue

    @property
    def own(self) -> Path:
        return self.config / "appliance"
