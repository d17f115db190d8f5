"""Parses what a user types for a model: `org/repo`, `org/repo:Q4_K_M`, `org/repo@revision`, `org/repo/file.gguf`, or a
URL."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from appliance.errors import ConfigError, printable
from appliance.values import dataclass

HUB_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
_FORMS = "as in org/repo, org/repo:Q4_K_M, org/repo@revision, org/repo/file.gguf or https://host/file.gguf"
_PREFIXES = ("hf://", "hf.co/", "huggingface.co/")
# huggingface_hub's own rule, utils/_validators.py: no "--" and no "..", because folder names are built with them.
_WORD = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?")
_QUANT = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./-]{0,127}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# OCI artifacts: `oci://…`, `docker://…`, and addresses of registries: a host that ends in letters, a number with a
# port, or this machine.
_OCI = frozenset({"oci", "docker", "oci-archive", "containers-storage"})
_HOST = r"(?:localhost|[\w-]+(?:\.[\w-]+)*\.[a-z]{2,})(?::\d+)?|[\d.]+:\d+|\[[\da-f:]+\](?::\d+)?"
_REGISTRY = re.compile(rf"(?:{_HOST})/", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A repository of the hub and which part of it is meant, or `url` alone."""

    text: str  # as the user typed it
    repo: str | None = None
    revision: str | None = None
    quant: str | None = None
    path: str | None = None
    url: str | None = None


def looks_remote(text: str) -> bool:
    """True if `text` may be more than a name on the volume. A quick check of the form; does not look whether the model
    exists."""
    return bool(_SCHEME.match(text)) or (text.count("/") >= 1 and not text.startswith(("/", "./", "../", "~")))


def parse_reference(text: str, endpoint: str = "") -> Reference:
    """Return the parsed reference; a web address of the hub means the repository. Raises ConfigError that lists the
    accepted forms."""
    scheme = _SCHEME.match(text)
    if scheme:
        refuse_password(text)
    if scheme and scheme[1].lower() in _OCI:
        raise _artifact(text)
    if scheme and scheme[1].lower() in ("http", "https"):
        return _of_url(text, endpoint)
    short = text
    for prefix in _PREFIXES:
        short = short.removeprefix(prefix)
    if _SCHEME.match(short):
        raise _refusal(text, f"the scheme {short.partition('://')[0]} is unknown")
    return _of_repo(text, short)


def refuse_artifact(text: str) -> None:
    """Raise ConfigError if `text` names an artifact of a registry."""
    scheme = _SCHEME.match(text)
    if scheme:
        is_artifact = scheme[1].lower() in _OCI
    else:
        is_file = text.lower().endswith(".gguf")  # a path whose first folder has a dot in its name
        is_artifact = not is_file and bool(_REGISTRY.match(text)) and text.partition("/")[0] not in HUB_HOSTS
    if is_artifact:
        raise _artifact(text)


def _artifact(text: str) -> ConfigError:
    hint = (
        "name the same model on Hugging Face, as in org/repository:Q4_K_M, or give the https address of its file, "
        "or pull it with the tool that made it, mount its folder, and see `appliance models list`"
    )
    return ConfigError(f"OCI artifacts are not fetched: {printable(text)}", hint=hint)


def _of_url(text: str, endpoint: str) -> Reference:
    address = _split(text)
    hosts = (*HUB_HOSTS, urlsplit(endpoint).netloc)
    parts = [part for part in address.path.split("/") if part]
    if address.netloc in hosts and len(parts) == 2:
        return _of_repo(text, "/".join(parts))
    if address.netloc in hosts and len(parts) > 4 and parts[2] in ("resolve", "blob"):
        path = unquote("/".join(parts[4:]))
        return _of_repo(text, f"{parts[0]}/{parts[1]}/{path}@{unquote(parts[3])}")
    if address.netloc in hosts and len(parts) > 3 and parts[2] == "tree":
        return _of_repo(text, f"{parts[0]}/{parts[1]}@{unquote('/'.join(parts[3:]))}")
    if not file_name(text):
        raise _refusal(text, "its path names no file")
    return Reference(text=text, url=text)


def _split(text: str) -> _Address:
    try:
        address = urlsplit(text)
        address.port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise _refusal(text, str(error).lower()) from error
    if not address.hostname:
        raise _refusal(text, "it names no host")
    return _Address(netloc=address.netloc, path=address.path)


def refuse_password(text: str) -> None:
    """Raise ConfigError if the address contains a user or a password, whatever its scheme."""
    scheme, slashes, rest = text.partition("://")
    user, at, _ = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")
    if slashes and at:
        shown = f"{scheme}://{rest.replace(user + at, '…@', 1)}"
        raise _refusal(shown, "a password in a URL ends in logs")


@dataclass(frozen=True, kw_only=True)
class _Address:
    netloc: str
    path: str


def file_name(url: str) -> str:
    """Return the last part of the URL's path, unquoted; empty if it cannot be a file's name."""
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    return "" if name in (".", "..") or "/" in name or not name.isprintable() else name


def _of_repo(text: str, short: str) -> Reference:
    short, at, revision = short.partition("@")
    if at and ":" in revision:  # org/repo@revision:quant as well as org/repo:quant@revision
        revision, _, quant = revision.partition(":")
        short = f"{short}:{quant}"
    short, colon, quant = short.partition(":")
    org, _, rest = short.partition("/")
    name, slash, path = rest.partition("/")
    problem = _problem(org, name, path if slash else None, quant if colon else None, revision if at else None)
    if problem:
        raise _refusal(text, problem)
    return Reference(text=text, repo=f"{org}/{name}", revision=revision or None, quant=quant or None, path=path or None)


def _problem(org: str, name: str, path: str | None, quant: str | None, revision: str | None) -> str | None:
    if not _WORD.fullmatch(org) or not _WORD.fullmatch(name):
        return "it is not org/repo"
    if path is not None and (not is_safe_path(path) or not path.lower().endswith(".gguf")):
        return f"'{path}' is not the path of a GGUF file"
    if quant is not None and not _QUANT.fullmatch(quant):
        return f"'{quant}' is not a quantization"
    if path and quant:
        return "it names a file and a quantization"
    if revision is not None and not _REVISION.fullmatch(revision):
        return f"'{revision}' is not a revision"
    return None


def is_safe_path(path: str) -> bool:
    """True if `path` is relative, stays below its folder and is printable. Paths come from listings of other
    servers."""
    parts = PurePosixPath(path).parts
    plain = "/".join(parts) == path and path.isprintable() and "\\" not in path
    return plain and bool(parts) and not path.startswith("/") and not {".", ".."} & set(parts)


def _refusal(text: str, problem: str) -> ConfigError:
    shown = text if text.isprintable() else repr(text)
    message = f"reference to a model is not understood: {shown:.200}: {problem}"
    return ConfigError(message, hint=_FORMS)
