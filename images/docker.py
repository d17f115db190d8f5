"""The only file of the build half that starts programs or talks to the engine.

buildx has no HTTP interface of its own, so it is the docker command; everything else goes through docker-py. git and uv
are started here too, so that there is one place to look for what runs on the user's machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
import requests.exceptions
from docker.models.containers import Container

from images.errors import BuildError

T = TypeVar("T")
KEPT_LINES = 400
ENGINE_TIMEOUT_S = 600.0  # loading or saving a CUDA image takes minutes on a slow disk
HTTP_CONFLICT = 409
NOT_STARTED, NOT_FOUND = 126, 127
LOCAL_ENGINE = "http+docker://"  # docker-py's name for a unix socket
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A program that ended. `lines` are its last lines, both streams together, oldest first."""

    code: int
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Image:
    id: str
    tags: tuple[str, ...]
    digests: tuple[str, ...]  # of the registries it came from, `name@sha256:…`
    config: Mapping[str, Any]
    size_bytes: int = 0
    platform: str = ""  # as the matrix writes it: linux/amd64

    @property
    def labels(self) -> Mapping[str, str]:
        return self.config.get("Labels") or {}


@dataclass(frozen=True, kw_only=True)
class CacheRecord:
    """One entry of the builder's cache. `description` names the instruction that made it."""

    id: str
    description: str
    size_bytes: int
    is_in_use: bool


@dataclass(frozen=True, kw_only=True)
class Hardening:
    """How a container is restricted: the harshest form that DESIGN.md section 5 promises to work."""

    user: str = "12345:0"
    memory_bytes: int = 1 << 30


def stream(argv: tuple[str, ...], *, cwd: Path) -> Finished:
    """Runs a program and copies what it says to stderr as it comes: stdout stays data."""
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    with _started(argv, cwd) as process:
        for line in process.stdout or ():
            sys.stderr.write(line)
            kept.append(line.rstrip("\n"))
        return Finished(code=process.wait(), lines=tuple(kept))


def capture(argv: tuple[str, ...], *, cwd: Path) -> Finished:
    """Runs a short program in silence."""
    try:
        done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        # As a shell says it: not there, or there and not to be started.
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
        return Finished(code=code, lines=(f"{argv[0]}: {error.strerror}",))
    return Finished(code=done.returncode, lines=tuple((done.stdout + done.stderr).splitlines()))


def feed(argv: tuple[str, ...], parse: Callable[[Iterable[str]], T], *, cwd: Path) -> tuple[T, Finished]:
    """Runs a program and hands its stdout to `parse` as it comes; `lines` of the result are those of its stderr."""
    with tempfile.TemporaryFile("w+") as errors:  # a pipe of its own could fill up while nobody reads it
        try:
            process = subprocess.Popen(argv, cwd=cwd, stdout=subprocess.PIPE, stderr=errors, text=True)
        except OSError as error:
            raise _not_started(argv[0], error) from error
        with process:
            parsed = parse(line.rstrip("\n") for line in process.stdout or ())
            code = process.wait()
        errors.seek(0)
        return parsed, Finished(code=code, lines=tuple(errors.read().splitlines()))


def _not_started(program: str, error: OSError) -> BuildError:
    hint = "install Docker with its buildx plugin" if program == "docker" else "is it installed, and on the PATH?"
    return BuildError(f"program cannot be started: {program}: {error.strerror}", hint=hint)


@contextmanager
def _started(argv: tuple[str, ...], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A running program that is gone when the block is left, also by an interrupt."""
    try:
        # A compiler's line may be cut in the middle of a character.
        process = subprocess.Popen(
            argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise _not_started(argv[0], error) from error
    with process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise


class Engine:
    """The Docker engine, connected to when it is first needed; BuildError in words when there is none."""

    @cached_property
    def _client(self) -> docker.DockerClient:
        with _in_words("the Docker engine does not answer"):
            client = docker.from_env(timeout=int(ENGINE_TIMEOUT_S))
            client.ping()
            return client

    @property
    def platform(self) -> str:
        """As the matrix writes it: linux/amd64."""
        with _in_words("the engine does not say what it is"):
            version = self._client.version()
        architecture = str(version["Arch"])
        return f"{version['Os']}/{ARCHITECTURES.get(architecture, architecture)}"

    @property
    def image_store(self) -> str:
        """What keeps its images: `io.containerd.snapshotter.v1`, or the name of a storage driver such as overlay2."""
        with _in_words("the engine does not say how it keeps images"):
            info = self._client.info()
        status = dict(info.get("DriverStatus") or [])
        return str(status.get("driver-type") or info.get("Driver"))

    def image(self, reference: str) -> Image | None:
        """None when the engine has no such image."""
        with _in_words(f"the engine cannot inspect {reference}"):
            try:
                return _image(self._client.images.get(reference).attrs)
            except docker.errors.ImageNotFound:
                return None

    def images_labelled(self, labels: Mapping[str, str]) -> list[Image]:
        wanted = [f"{name}={value}" for name, value in labels.items()]
        with _in_words("the engine cannot list its images"):
            return [_image(image.attrs) for image in self._client.images.list(filters={"label": wanted})]

    def images_untagged(self, label: str) -> list[Image]:
        """Those that carry this label and have no name any more."""
        with _in_words("the engine cannot list its images"):
            found = self._client.images.list(filters={"label": label, "dangling": True})
            return [_image(image.attrs) for image in found]

    def remove(self, image_id: str) -> bool:
        """False when a container still uses it, which keeps it."""
        with _in_words(f"the engine cannot remove {image_id}"):
            try:
                self._client.images.remove(image_id)
            except docker.errors.ImageNotFound:
                return True
            except docker.errors.APIError as error:
                if error.status_code == HTTP_CONFLICT:
                    return False
                raise
            return True

    def build_cache(self) -> list[CacheRecord]:
        with _in_words("the engine does not say what its builder keeps"):
            records = self._client.df().get("BuildCache") or ()
        return [
            CacheRecord(
                id=record["ID"],
                description=str(record.get("Description") or ""),
                size_bytes=int(record.get("Size") or 0),
                is_in_use=bool(record.get("InUse")),
            )
            for record in records
        ]

    def prune_cache(self, record_id: str) -> int:
        """Bytes that removing this one record gave back; 0 when another needs it or it is gone."""
        with _in_words(f"the engine cannot remove {record_id} from its builder's cache"):
            # The stubs know two of the filters that the engine takes.
            done = self._client.api.prune_builds(filters={"id": record_id}, all=True)  # type: ignore[arg-type]
        return int(done.get("SpaceReclaimed") or 0)

    def data_folder(self) -> Path | None:
        """Where the engine keeps images and cache; None where that is not on this machine's own disk."""
        with _in_words("the engine does not say where its data is"):
            folder = Path(str(self._client.info()["DockerRootDir"]))
            is_local = self._client.api.base_url.startswith(LOCAL_ENGINE)
        return folder if is_local and folder.is_dir() else None

    def tag(self, image_id: str, tag: str) -> None:
        with _in_words(f"the engine cannot tag {image_id}"):
            self._client.images.get(image_id).tag(tag)

    def load(self, archive: Path) -> None:
        """Loads an OCI archive under the name that it carries."""
        with _in_words(f"the engine cannot load {archive}"), archive.open("rb") as data:
            self._client.images.load(data)

    def save(self, reference: str, archive: Path) -> None:
        """Writes an image's layers and configuration as one archive. The file is gone if that fails."""
        with _in_words(f"the engine cannot save {reference}"), _whole(archive), archive.open("wb") as file:
            for chunk in self._client.images.get(reference).save(named=True):
                file.write(chunk)

    def run(self, image: str, argv: tuple[str, ...], *, entrypoint: tuple[str, ...] | None = None) -> Finished:
        """Runs one command in a hardened container without a network, waits for it and removes it with its volume."""
        with _in_words(f"the engine cannot run {image}"):
            container = self._client.containers.create(
                image, list(argv), entrypoint=list(entrypoint) if entrypoint else None, **_hardened(Hardening())
            )
            return _run_to_end(container)

    def run_shell(self, image: str, script: str) -> Finished:
        """Runs a script as root with a network, as a step of a build would, and removes the container."""
        with _in_words(f"the engine cannot run {image}"):
            container = self._client.containers.create(image, ["sh", "-euc", script], entrypoint=[])
            return _run_to_end(container)


def _run_to_end(container: Container) -> Finished:
    """Starts a container, waits for it and removes it with its volume."""
    try:
        container.start()
        code = int(container.wait()["StatusCode"])
        text = container.logs(stdout=True, stderr=True).decode("utf-8", "replace")
    finally:
        container.remove(v=True, force=True)
    return Finished(code=code, lines=tuple(text.splitlines()))


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a registry has under a name."""

    digest: str  # of the index, where there is one
    platforms: tuple[str, ...] | None  # the engine does not say it of a single OCI manifest


def query_registry(reference: str, *, timeout_s: float) -> Published:
    """Asked through the engine, which knows how to reach it. BuildError when none answers or it has no such image."""
    try:
        found = docker.from_env(timeout=int(timeout_s)).images.get_registry_data(reference)
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        message = f"no registry gives the digest of {reference}: {error}"
        raise BuildError(message, hint="is the name right, and does `docker pull` reach the registry?") from error
    said = found.attrs["Platforms"]
    platforms = None if said is None else tuple(f"{each['os']}/{each['architecture']}" for each in said)
    return Published(digest=found.id, platforms=platforms)


def registry_has(reference: str, *, timeout_s: float) -> bool:
    """Whether a registry, asked through the engine, knows this reference; False also when none answers in time."""
    try:
        docker.from_env(timeout=int(timeout_s)).images.get_registry_data(reference)
    except (docker.errors.DockerException, requests.exceptions.RequestException):
        return False
    return True


def _image(attributes: Mapping[str, Any]) -> Image:
    return Image(
        id=attributes["Id"],
        tags=tuple(attributes.get("RepoTags") or ()),
        digests=tuple(attributes.get("RepoDigests") or ()),
        config=attributes.get("Config") or {},
        size_bytes=int(attributes.get("Size") or 0),
        platform=f"{attributes.get('Os')}/{attributes.get('Architecture')}",
    )


def _hardened(hardening: Hardening) -> dict[str, Any]:
    return {
        "user": hardening.user,
        "read_only": True,
        "tmpfs": {"/tmp": ""},  # noqa: S108 - a path inside the container
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "network_mode": "none",
        "mem_limit": hardening.memory_bytes,
    }


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        message = f"{what}: {error}"
        raise BuildError(message, hint="is Docker running, and may this user use it? `docker info` says") from error
    except OSError as error:
        message = f"{what}: {error}"
        raise BuildError(message, hint="look at the free space with: docker system df") from error


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Leaves a file only if it was written to its end."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
