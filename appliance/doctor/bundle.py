"""The bundle for a bug report: one JSON file that its sender can read before sending it.

It contains the checks, the hardware, the image and the engine, the settings with their sources, and the plan. It does
not contain the key, uuids and addresses of devices, folders, or names of users, hosts and other programs. File names of
models stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance import __version__
from appliance.doctor.examine import Findings
from appliance.errors import ConfigError
from appliance.plan import as_document as plan_document
from appliance.probe import as_document
from appliance.settings import SETTINGS, Settings

HIDDEN = "<hidden>"
HIDDEN_NAMES = frozenset({"uuid", "serial", "mig_parent"})
_PATTERNS = (
    (re.compile(r"\b(?:GPU|MIG)-[0-9A-Za-z/-]{8,}"), "<uuid>"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<uuid>"),
    (re.compile(r"\b(?:sk|hf)[-_][\w-]{8,}"), "<token>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<mail>"),
    (re.compile(r"(?<![\w.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"), "<address>"),
)
# Paths of system folders reveal nothing. Every other path may name a person, a company or a project.
_PATH = re.compile(r"(?<![\w<>.])/(?!(?:dev|proc|sys|usr|lib|lib64|opt)/)(?:[^\s/'\",:;()]+/)+")


def bundle(settings: Settings, findings: Findings, names: Sequence[str], secrets: Sequence[str]) -> str:
    """Return the bundle as JSON text. `names` are words to hide if they stand alone, such as the host's name; `secrets`
    are hidden inside other words too."""
    holders = [holder.name for gpu in findings.hardware.gpus.gpus for holder in gpu.holders if holder.name]
    document = {
        "appliance": __version__,
        "checks": [asdict(check) for check in findings.checks],
        "hardware": as_document(findings.hardware),
        "image": asdict(findings.image) if findings.image else None,
        "engine": asdict(findings.engine) if findings.engine else None,
        "settings": {name: _setting(settings, name) for name in SETTINGS},
        "plan": plan_document(findings.plan) if findings.plan else None,
    }
    return json.dumps(_Redaction(settings, [*names, *holders], secrets).of(document), indent=1, default=str) + "\n"


def write_bundle(path: Path, text: str) -> None:
    """Write the bundle to a new file. An existing file is not overwritten: it may be another report's. Raises
    ConfigError."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        message = f"bundle cannot be written: {path}: {(error.strerror or str(error)).lower()}"
        raise ConfigError(message, hint="name a new file in a folder that can be written") from error


def _setting(settings: Settings, name: str) -> dict[str, Any]:
    value = getattr(settings, name)
    is_plain = value is None or isinstance(value, bool | int | float)
    return {"value": value if is_plain else str(value), "source": settings.sources[name]}


class _Redaction:
    """Replaces private text. A known folder is replaced by the setting that names it, so that a reader still sees what
    lies where."""

    def __init__(self, settings: Settings, names: Sequence[str], secrets: Sequence[str]) -> None:
        folders = {name: str(getattr(settings, name)) for name in SETTINGS if name.endswith("_dir")}
        known = {f"{path.rstrip('/')}/": f"<{name}>/" for name, path in folders.items() if path != "/"}
        if settings.model and "/" in settings.model:
            known[f"{Path(settings.model).parent}/"] = "<folder>/"
        known |= {path.rstrip("/"): f"<{name}>" for name, path in folders.items() if len(path) > len("/tmp")}  # noqa: S108
        known |= {secret: HIDDEN for secret in secrets if secret}
        self._known = sorted(known.items(), key=lambda pair: len(pair[0]), reverse=True)
        self._names = [re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE) for name in names if name]

    def of(self, value: Any, name: str = "") -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, Mapping):
            return {str(key): self.of(item, str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._holder(item) if name == "holders" else self.of(item, name) for item in value]
        if name in HIDDEN_NAMES and value is not None:
            return HIDDEN
        return self.text(str(value)) if isinstance(value, str | Path) else value

    def text(self, text: str) -> str:
        for word, shown in self._known:
            text = text.replace(word, shown)
        for name in self._names:
            text = name.sub(HIDDEN, text)
        for pattern, shown in _PATTERNS:
            text = pattern.sub(shown, text)
        return _PATH.sub("<folder>/", text)

    def _holder(self, holder: Mapping[str, Any]) -> dict[str, Any]:
        return {"used_mib": holder.get("used_mib")}
