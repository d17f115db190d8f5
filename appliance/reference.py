"""Parses what a user types for a model: `org/repo`, `org/repo:Q4_K_M`, `org/repo@revision`, `org/repo/file.gguf`, a
URL, or an artifact of a container registry: `oci://host/repository:tag`."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from appliance.errors import ConfigError, printable
from appliance.values import dataclass

HUB_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
_FORMS = (
    "as in org/repo, org/repo:Q4_K_M, org/repo@revision, org/repo/file.gguf, https://host/file.gguf or "
    "oci://host/repository:tag"
)
_PREFIXES = ("hf://", "hf.co/", "huggingface.co/")
# huggingface_hub's own rule, utils/_validators.py: no "--" and no "..", because folder names are built with them.
_WORD = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?")
_QUANT = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./-]{0,127}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Artifacts of container registries. The other schemes are containers/image's names for places on a disk.
_OCI = frozenset({"oci", "docker"})
_OCI_ON_DISK = frozenset({"oci-archive", "containers-storage"})
# Without a scheme, a registry is known by its address: a host that ends in letters, a number with a port, or this
# machine.
_HOST = r"(?:localhost|[\w-]+(?:\.[\w-]+)*\.[a-z]{2,})(?::\d+)?|[\d.]+:\d+|\[[\da-f:]+\](?::\d+)?"
_REGISTRY = re.compile(rf"(?:{_HOST})/", re.IGNORECASE)
# Grammar of the distribution specification, spec.md, "Pulling manifests", and of its reference package.
_REGISTRY_HOST = re.compile(r"(?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*|\[[0-9A-Fa-f:]+\])(?::\d{1,5})?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_FOLDER_BYTES = 240  # a file name has at most 255 bytes, and the hub cache puts `models--` before it


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A model in a container registry. `digest` is the manifest's sha256 without its prefix; then there is no tag."""

    host: str  # with its port; docker.io for Docker Hub
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def name(self) -> str:
        """The whole reference, which names the same artifact as the user's own spelling."""
        return f"oci://{self.host}/{self.repository}{self._end}"

    @property
    def _end(self) -> str:
        return f"@sha256:{self.digest}" if self.digest else f":{self.tag}"

    @property
    def reference(self) -> str:
        """The last part of the manifest's address."""
        return f"sha256:{self.digest}" if self.digest else str(self.tag)

    @property
    def api(self) -> str:
        """Address of the repository. Plain HTTP only to this machine."""
        host = "registry-1.docker.io" if self.host == "docker.io" else self.host
        scheme = "http" if is_loopback(urlsplit(f"//{host}").hostname or "") else "https"
        return f"{scheme}://{host}/v2/{self.repository}"

    @property
    def folder(self) -> str:
        """Name for the hub's cache, without `models--`; `--` separates host and parts of the repository."""
        parts = (self.host, *f"{self.repository}{self._end}".split("/"))
        return "--".join(("oci", *(quote(part, safe="").replace("--", "-%2D") for part in parts)))


def artifact_of_folder(folder: str) -> str | None:
    """Return the reference whose `Artifact.folder` this is; None for the folder of a repository of the hub."""
    kind, *parts = folder.split("--")
    # A repository of the hub has two parts, so that organisation `oci` is none of ours.
    return f"oci://{'/'.join(map(unquote, parts))}" if kind == "oci" and len(parts) > 1 else None


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(?:\.\d{1,3}){3}", host))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A repository of the hub and which part of it is meant, or `url` alone, or `artifact` alone."""

    text: str  # as the user typed it
    repo: str | None = None
    revision: str | None = None
    quant: str | None = None
    path: str | None = None
    url: str | None = None
    artifact: Artifact | None = None


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
        return Reference(text=text, artifact=_of_registry(text))
    if scheme and scheme[1].lower() in ("http", "https"):
        return _of_url(text, endpoint)
    short = text
    for prefix in _PREFIXES:
        short = short.removeprefix(prefix)
    if _SCHEME.match(short):
        refuse_artifact(text)
        raise _refusal(text, f"the scheme {short.partition('://')[0]} is unknown")
    return _of_repo(text, short)


def refuse_artifact(text: str) -> None:
    """Raise ConfigError if `text` is the address of a registry without a scheme, or an image in a local store."""
    scheme = _SCHEME.match(text)
    if scheme and scheme[1].lower() in _OCI_ON_DISK:
        message = f"artifacts of a local store are not read: {printable(text)}"
        raise ConfigError(message, hint="push it to a registry and name it there, as in oci://host/repository:tag")
    is_file = text.lower().endswith(".gguf")  # a path whose first folder has a dot in its name
    if not scheme and not is_file and _REGISTRY.match(text) and text.partition("/")[0] not in HUB_HOSTS:
        message = f"address of a container registry has no scheme: {printable(text)}"
        raise ConfigError(message, hint=f"write oci://{printable(text)}")


def _of_registry(text: str) -> Artifact:
    rest = text.partition("://")[2]
    rest, at, digest = rest.partition("@")
    host, slash, path = rest.partition("/")
    if not slash or not (host == "localhost" or {".", ":"} & set(host)):
        host, path = "docker.io", rest  # as docker itself reads names
    if host in DOCKER_HUB:
        host, path = "docker.io", path if "/" in path else f"library/{path}"
    repository, colon, tag = path.partition(":")
    sha256 = _DIGEST.fullmatch(digest)
    problem = None
    if not _REGISTRY_HOST.fullmatch(host):
        problem = f"'{host}' is not the host of a registry"
    elif not _REPOSITORY.fullmatch(repository):
        problem = f"'{repository}' is not a repository of a registry, which has lower-case letters and digits"
    elif colon and not _TAG.fullmatch(tag):
        problem = f"'{tag}' is not a tag"
    elif at and not sha256:
        problem = f"'{digest}' is not a digest, which is sha256: and 64 digits"
    if problem:
        raise _refusal(text, problem)
    found = Artifact(host=host, repository=repository, tag=None if sha256 else tag or "latest",
                     digest=sha256[1] if sha256 else None)  # fmt: skip
    if len(found.folder) > _FOLDER_BYTES:
        raise _refusal(text, f"it is longer than {_FOLDER_BYTES} bytes")
    return found


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
        refuse_artifact(text)
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
