"""What is put into a tool's configuration: an endpoint, a model, and where its key can be read."""

from __future__ import annotations

from pathlib import Path

from appliance.host.docker.endpoint import Endpoint
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    endpoint: Endpoint
    model: str
    context: int | None  # tokens; None: unknown
    key_file: Path | None  # holds the key; None: the endpoint asks for none

    @property
    def key(self) -> str | None:
        return self.endpoint.key


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where this user's tools keep their settings."""

    home: Path
    config: Path  # XDG_CONFIG_HOME, or ~/.config
    claude: Path  # CLAUDE_CONFIG_DIR, or ~/.claude
    continue_: Path  # CONTINUE_GLOBAL_DIR, or ~/.continue

    @property
    def own(self) -> Path:
        return self.config / "appliance"
