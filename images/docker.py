"""The only file of the build half that starts programs or talks to the engine.

buildx has no HTTP interface of its own, so it is the docker command; everything else goes through docker-py. git and uv
are started here too, so that there is one place to look for what runs on the user's machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

import docker
import docker.errors
import requests.exceptions
from docker.models.containers import Container

from images.errors import BuildError

T = TypeVar("T")
KEPT_LINES = 400
ENGINE_TIMEOUT_S = 600.0  # loading or saving a CUDA image takes minutes on a slow disk
QUICK_TIMEOUT_S = 20.0  # without an answer by then it hangs: docker and nvidia-smi need seconds at most
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0  # from SIGTERM to SIGKILL
HTTP_CONFLICT = 409
TIMED_OUT, NOT_STARTED, NOT_FOUND = 124, 126, 127
LOCAL_ENGINE = "http+docker://"  # docker-py's name for a unix socket
# Lines of BuildKit's plain progress: a command with its number and stage, and a step that was cached. Steps that only
# copy take no time, and cells share them.
STEP = re.compile(r"^#(\d+) \[(?:linux/\w+ )?([\w.-]+) +\d+/\d+\] RUN\b")
KEPT_STEP = re.compile(r"^#(\d+) CACHED$")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# An image's name without tag and digest. A dot, a port or being localhost tells a registry's host from an account.
IMAGE_NAME = re.compile(
    r"^(?:[A-Za-z0-9][\w.-]*(?::\d+)?/)?[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*$"
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A program that ended. `lines` are the last lines of both streams, oldest first.

    `kept_stages` are stages of a build with a cached command.
    """

    code: int
    lines: tuple[str, ...]
    kept_stages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Image:
    id: str
    tags: tuple[str, ...]
    digests: tuple[str, ...]  # registries it came from: `name@sha256:…`
    config: Mapping[str, Any]
    size_bytes: int = 0
    platform: str = ""  # the matrix's form: linux/amd64

    @property
    def labels(self) -> Mapping[str, str]:
        return self.config.get("Labels") or {}


def parse_inspected(line: str) -> Image | None:
    """Parses a line of `docker image inspect`: id, names and labels, the latter two as JSON. None for another line."""
    digest, _, rest = line.partition(" ")
    try:
        tags, end = json.JSONDecoder().raw_decode(rest)
        labels = json.loads(rest[end:])
    except ValueError:
        return None
    return Image(id=digest, tags=tuple(tags or ()), digests=(), config={"Labels": labels})


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


class _NotStartedError(BuildError):
    """A program that did not start. `code` is the shell's: missing, or not executable."""

    def __init__(self, program: str, error: OSError) -> None:
        hint = "install Docker with its buildx plugin" if program == "docker" else "is it installed, and on the PATH?"
        super().__init__(f"program cannot be started: {program}: {error.strerror}", hint=hint)
        self.code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
        self.said = f"{program}: {error.strerror}"


def stream(argv: tuple[str, ...], *, cwd: Path) -> Finished:
    """Runs a program and copies its output to stderr as it comes: stdout stays data."""
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    stages: dict[str, str] = {}
    done: list[str] = []
    with _started(argv, cwd, stderr=subprocess.STDOUT) as process:
        for line in process.stdout or ():
            sys.stderr.write(line)
            kept.append(line.rstrip("\n"))
            if step := STEP.match(line):
                stages[step[1]] = step[2]
            elif (step := KEPT_STEP.match(line)) and step[1] in stages:
                done.append(stages[step[1]])
        return Finished(code=process.wait(), lines=tuple(kept), kept_stages=tuple(dict.fromkeys(done)))


def capture(argv: tuple[str, ...], *, cwd: Path, timeout_s: float | None = None) -> Finished:
    """Runs a short program in silence. Without an answer in time it is ended, and its code is TIMED_OUT."""
    try:
        with _started(argv, cwd, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=timeout_s)
            return Finished(code=process.returncode, lines=tuple((out + err).splitlines()))
    except subprocess.TimeoutExpired:
        return Finished(code=TIMED_OUT, lines=(f"{argv[0]}: no answer in {timeout_s:g} s",))
    except _NotStartedError as error:
        return Finished(code=error.code, lines=(error.said,))


def feed(argv: tuple[str, ...], parse: Callable[[Iterable[str]], T], *, cwd: Path) -> tuple[T, Finished]:
    """Runs a program and hands its stdout to `parse` as it comes; `lines` of the result are those of stderr."""
    with tempfile.TemporaryFile("w+") as errors:  # a pipe of its own could fill up while nobody reads it
        # In our own group: several run at once in threads, where only the terminal's interrupt reaches them.
        with _started(argv, cwd, stderr=errors, has_group=False) as process:
            parsed = parse(line.rstrip("\n") for line in process.stdout or ())
            code = process.wait()
        errors.seek(0)
        return parsed, Finished(code=code, lines=tuple(errors.read().splitlines()))


@contextmanager
def _started(
    argv: tuple[str, ...], cwd: Path, *, stderr: int | IO[str], has_group: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """Runs a program that is gone when the block is left, even after an interrupt.

    `has_group`: True to give it a process group, for its children: docker runs buildx as a child.
    """
    process = None
    try:
        with _undisturbed():
            process = _popen(argv, cwd, stderr=stderr, has_group=has_group)
        yield process
        process.wait()
    except BaseException:
        if process is not None:
            _end(process, has_group=has_group)
        raise
    finally:
        for pipe in (process.stdout, process.stderr) if process is not None else ():
            if pipe:
                pipe.close()


def _popen(argv: tuple[str, ...], cwd: Path, *, stderr: int | IO[str], has_group: bool) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            stdin=subprocess.DEVNULL,  # reading the terminal would stop a group that is not the terminal's
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",  # a compiler's line may be cut in the middle of a character
            process_group=0 if has_group else None,
        )
    except OSError as error:
        raise _NotStartedError(argv[0], error) from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delays a request to end until the block is left: a program just started would be left running."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no signal comes here
        return
    handlers = {number: signal.getsignal(number) for number in ENDING}
    asked = {number: handler for number, handler in handlers.items() if callable(handler)}
    held: list[int] = []
    for number in asked:
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number, handler in asked.items():
            signal.signal(number, handler)
    for each in held:
        signal.raise_signal(each)


def _end(process: subprocess.Popen[str], *, has_group: bool) -> None:
    """Sends SIGTERM, then SIGKILL to what is left. Gives up on a program that the kernel does not release."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # it ended meanwhile
            if has_group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


class Engine:
    """The Docker engine, connected at the first use. Raises BuildError if there is none."""

    def __init__(self, *, quick_timeout_s: float = QUICK_TIMEOUT_S) -> None:
        self._quick_timeout_s = quick_timeout_s

    @cached_property
    def _quick(self) -> docker.DockerClient:
        """Client for questions that an engine answers at once; one that hangs is given up."""
        with _in_words("the Docker engine does not answer"):
            client = docker.from_env(timeout=int(self._quick_timeout_s))
            client.ping()
            return client

    @cached_property
    def _client(self) -> docker.DockerClient:
        _ = self._quick
        with _in_words("the Docker engine does not answer"):
            return docker.from_env(timeout=int(ENGINE_TIMEOUT_S))

    @property
    def platform(self) -> str:
        """Platform in the matrix's form: linux/amd64."""
        with _in_words("the engine does not say what it is"):
            version = self._quick.version()
        architecture = str(version["Arch"])
        return f"{version['Os']}/{ARCHITECTURES.get(architecture, architecture)}"

    @property
    def image_store(self) -> str:
        """Returns the engine's image store: `io.containerd.snapshotter.v1`, or a storage driver such as overlay2."""
        with _in_words("the engine does not say how it keeps images"):
            info = self._quick.info()
        status = dict(info.get("DriverStatus") or [])
        return str(status.get("driver-type") or info.get("Driver"))

    def image(self, reference: str) -> Image | None:
        """Returns the image, or None if the engine has none of that name."""
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
        """Returns images that carry this label and have lost their name."""
        with _in_words("the engine cannot list its images"):
            found = self._client.images.list(filters={"label": label, "dangling": True})
            return [_image(image.attrs) for image in found]

    def remove(self, image_id: str) -> bool:
        """Removes an image. False if a container still uses it."""
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
        """Removes one record and returns the bytes given back; 0 if another needs it or it is gone."""
        with _in_words(f"the engine cannot remove {record_id} from its builder's cache"):
            # The stubs know two of the filters that the engine takes.
            done = self._client.api.prune_builds(filters={"id": record_id}, all=True)  # type: ignore[arg-type]
        return int(done.get("SpaceReclaimed") or 0)

    def data_folder(self) -> Path | None:
        """Returns the engine's folder of images and cache; None if it is not on this machine's own disk."""
        with _in_words("the engine does not say where its data is"):
            folder = Path(str(self._quick.info()["DockerRootDir"]))
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
    """An entry of a registry under a name."""

    digest: str  # digest of the index, if there is one
    platforms: tuple[str, ...] | None  # None for a single OCI manifest: the engine does not tell


def query_registry(reference: str, *, timeout_s: float) -> Published:
    """Asks a registry through the engine, which can reach it. Raises BuildError without an answer or image."""
    try:
        found = docker.from_env(timeout=int(timeout_s)).images.get_registry_data(reference)
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        message = f"no registry gives the digest of {reference}: {error}"
        raise BuildError(message, hint="is the name right, and does `docker pull` reach the registry?") from error
    said = found.attrs["Platforms"]
    platforms = None if said is None else tuple(f"{each['os']}/{each['architecture']}" for each in said)
    return Published(digest=found.id, platforms=platforms)


def registry_has(reference: str, *, timeout_s: float) -> bool:
    """True if a registry, asked through the engine, has this reference. False also if none answers in time."""
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
