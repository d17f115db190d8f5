"""The supported tools and the values that each one's configuration file gets. Formats are those of the packages named
in README.md. Pure, except that it looks which of a tool's files exist.

If a tool can read the key from elsewhere, its file only refers to it. Otherwise the file that holds the key gets mode
0600.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError
from appliance.host.inject.place import Item, Place, at
from appliance.host.inject.target import Places, Target
from appliance.values import dataclass

PROVIDER = "appliance"
KEY_NAME = "APPLIANCE_API_KEY"
SMALL_CONTEXT = 8192  # context assumed if the endpoint does not report it and the tool needs one
NO_KEY = "no-key"  # for tools that refuse an empty key


@dataclass(frozen=True, kw_only=True)
class Edit:
    place: Place
    value: Any
    is_secret: bool = False


@dataclass(frozen=True, kw_only=True)
class FileEdit:
    path: Path
    format: str  # of FORMATS
    edits: tuple[Edit, ...]

    @property
    def holds_key(self) -> bool:
        return any(edit.is_secret for edit in self.edits)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool. `edits` is None if no file configures it; `steps` then says what the user does instead."""

    name: str
    title: str
    file: Callable[[Places], Path] | None = None
    edits: Callable[[Path, Target, bool], tuple[FileEdit, ...]] | None = None  # third argument: True if the file is new
    steps: Callable[[Target], tuple[str, ...]]  # what the user does after the files are written, or instead
    needs_key_file: bool = False
    needs_file: bool = False  # True: it has no settings file of its own, so --file must name one


def _continue_file(places: Places) -> Path:
    folder = places.continue_
    found = next((path for name in ("config.yaml", "config.yml") if (path := folder / name).exists()), None)
    if found is None and (folder / "config.json").exists():
        message = f"Continue uses the older format, which a new config.yaml would hide: {folder / 'config.json'}"
        raise ConfigError(message, hint="let Continue convert it (its settings offer that), then inject again")
    return found or folder / "config.yaml"


def _continue(path: Path, target: Target, is_new: bool) -> tuple[FileEdit, ...]:
    model: dict[str, Any] = {
        "name": f"Appliance {target.model}",
        "provider": "openai",
        "model": target.model,
        "apiBase": target.endpoint.base,
        "roles": ["chat", "edit", "apply"],
    }
    if target.key:
        model["apiKey"] = "${{ secrets.%s }}" % KEY_NAME  # noqa: UP031 - the text has braces itself
    rows = (("name", "Local"), ("version", "1.0.0"), ("schema", "v1")) if is_new else ()
    head = tuple(Edit(place=at(key), value=value) for key, value in rows)
    entry = Edit(place=Place(keys=("models",), item=Item(key="name", value=model["name"])), value=model)
    config = FileEdit(path=path, format="yaml", edits=(*head, entry))
    if not target.key:
        return (config,)
    secret = Edit(place=at(KEY_NAME), value=target.key, is_secret=True)
    return FileEdit(path=path.parent / ".env", format="dotenv", edits=(secret,)), config


def _claude_code(path: Path, target: Target, _: bool) -> tuple[FileEdit, ...]:
    reads_key = f"cat {shlex.quote(str(target.key_file))}" if target.key_file else f"echo {NO_KEY}"
    variables = {
        "ANTHROPIC_BASE_URL": target.endpoint.root,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
    }
    edits = [Edit(place=at("env", name), value=value) for name, value in variables.items()]
    return (FileEdit(path=path, format="jsonc", edits=(Edit(place=at("apiKeyHelper"), value=reads_key), *edits)),)


def _opencode_file(places: Places) -> Path:
    folder = places.config / "opencode"
    names = ("opencode.jsonc", "opencode.json", "config.json")
    return next((path for name in names if (path := folder / name).exists()), folder / "opencode.json")


def _opencode(path: Path, target: Target, is_new: bool) -> tuple[FileEdit, ...]:
    options = {"baseURL": target.endpoint.base}
    if target.key_file:
        options["apiKey"] = f"{{file:{target.key_file}}}"
    limit = {"limit": {"context": target.context, "output": target.context // 4}} if target.context else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Appliance",
        "options": options,
        "models": {target.model: {"name": target.model, **limit}},
    }
    schema = (Edit(place=at("$schema"), value="https://opencode.ai/config.json"),) if is_new else ()
    return (FileEdit(path=path, format="jsonc", edits=(*schema, Edit(place=at("provider", PROVIDER), value=provider))),)


def _aider(path: Path, target: Target, _: bool) -> tuple[FileEdit, ...]:
    edits = (
        Edit(place=at("model"), value=f"openai/{target.model}"),
        Edit(place=at("openai-api-base"), value=target.endpoint.base),
        Edit(place=at("openai-api-key"), value=target.key or NO_KEY, is_secret=bool(target.key)),
    )
    return (FileEdit(path=path, format="yaml", edits=edits),)


def _zed(path: Path, target: Target, _: bool) -> tuple[FileEdit, ...]:
    model = {
        "name": target.model,
        "display_name": target.model,
        "max_tokens": target.context or SMALL_CONTEXT,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": False, "prompt_cache_key": False},
    }
    provider = {"api_url": target.endpoint.base, "available_models": [model]}
    place = at("language_models", "openai_compatible", PROVIDER)
    return (FileEdit(path=path, format="jsonc", edits=(Edit(place=place, value=provider),)),)


def _open_webui(path: Path, target: Target, _: bool) -> tuple[FileEdit, ...]:
    edits = (
        Edit(place=at("OPENAI_API_BASE_URL"), value=target.endpoint.base),
        Edit(place=at("OPENAI_API_KEY"), value=target.key or NO_KEY, is_secret=bool(target.key)),
    )
    return (FileEdit(path=path, format="dotenv", edits=edits),)


def _continue_steps(target: Target) -> tuple[str, ...]:
    return (f"Continue: choose 'Appliance {target.model}' in the list of models",)


def _claude_steps(target: Target) -> tuple[str, ...]:
    return (
        f"start `claude`; `/status` shows {target.endpoint.root}",
        "ANTHROPIC_API_KEY or ANTHROPIC_AUTH_TOKEN in the shell or in the same settings overrides this key",
    )


def _opencode_steps(target: Target) -> tuple[str, ...]:
    return (f"OpenCode: choose it with /models, or start `opencode --model {PROVIDER}/{target.model}`",)


def _aider_steps(_: Target) -> tuple[str, ...]:
    return ("start `aider`; a .aider.conf.yml or .env in a project overrides this file",)


def _zed_steps(target: Target) -> tuple[str, ...]:
    if not target.key_file:
        return (f"Zed needs a key even if none is required: start it with {KEY_NAME}={NO_KEY}",)
    return (
        "Zed reads keys from its keychain or from the environment, never from this file; one of:",
        f'  {KEY_NAME}="$(cat {shlex.quote(str(target.key_file))})" zed',
        f"  agent: open settings > LLM Providers > {PROVIDER}: paste the key, which `cat {target.key_file}` prints",
    )


def _open_webui_steps(target: Target) -> tuple[str, ...]:
    return (
        "start Open WebUI with `--env-file FILE`, or name it as `env_file:` in its compose file",
        "an Open WebUI that ran before keeps its own values: change them in Admin Settings > Connections, "
        "or set ENABLE_PERSISTENT_CONFIG=False",
        f"{target.endpoint.base} must be reachable from its container: 127.0.0.1 is the container itself there; "
        "put both on one Docker network and give `--url http://NAME:11435`",
    )


def _cursor_steps(target: Target) -> tuple[str, ...]:
    return (
        "Cursor keeps its models in its own database, so no file can be written",
        "Cursor calls a model from its own servers: the endpoint needs a public https address, not "
        f"{target.endpoint.base}",
        "Cursor Settings > Models > API Keys: turn on 'OpenAI API Key' and paste the key",
        "turn on 'Override OpenAI Base URL' and give the public address, which ends with /v1",
        f"'+ Add Custom Model': {target.model}",
    )


def _page_assist_steps(target: Target) -> tuple[str, ...]:
    return (
        "Page Assist keeps its settings in the browser, so no file can be written",
        "Settings > OpenAI Compatible API > Add Provider: Custom",
        f"Base URL: {target.endpoint.base}; API key: the appliance's",
        f"Save, then choose the model {target.model}",
    )


TOOLS: tuple[Tool, ...] = (
    Tool(name="continue", title="Continue", file=_continue_file, edits=_continue, steps=_continue_steps),
    Tool(
        name="claude-code",
        title="Claude Code",
        file=lambda places: places.claude / "settings.json",
        edits=_claude_code,
        steps=_claude_steps,
        needs_key_file=True,
    ),
    Tool(
        name="opencode",
        title="OpenCode",
        file=_opencode_file,
        edits=_opencode,
        steps=_opencode_steps,
        needs_key_file=True,
    ),
    Tool(
        name="aider",
        title="Aider",
        file=lambda places: places.home / ".aider.conf.yml",
        edits=_aider,
        steps=_aider_steps,
    ),
    Tool(
        name="zed",
        title="Zed",
        file=lambda places: places.config / "zed/settings.json",
        edits=_zed,
        steps=_zed_steps,
        needs_key_file=True,
    ),
    Tool(name="open-webui", title="Open WebUI", edits=_open_webui, steps=_open_webui_steps, needs_file=True),
    Tool(name="cursor", title="Cursor", steps=_cursor_steps),
    Tool(name="page-assist", title="Page Assist", steps=_page_assist_steps),
)
