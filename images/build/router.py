"""The image of the balancer in front of several appliances: the appliance's own, and the wheels of one lock.

The wheels are installed here, held to the lock's hashes, and copied into the image: the build itself needs no network,
no compiler and no Debian package.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from images import docker
from images.build.build import ARCHIVES, BUILD_ID_LABEL, CELL_LABEL, FILES_LABEL
from images.errors import BuildError, VerificationError
from images.matrix.matrix import LOCKS
from images.pins import lock

PROGRAM = "vllm-router"
NAME = "appliance-router"
LOCK = LOCKS / "router.txt"
DOCKERFILE = Path("images/router/Dockerfile")
CHECK = Path("images/router/check.py")
IDENTITY_LABEL = "io.appliance.router.id"  # hash of everything that the image is made of
CELL_LABELS = (BUILD_ID_LABEL, CELL_LABEL, FILES_LABEL)
PLATFORM = "linux/amd64"  # platform for which the lock was made
# Flags that compose/replicas.yaml and the Kubernetes manifests give it.
FLAGS = (
    "--cb-failure-threshold", "--cb-timeout-duration-secs", "--health-check-endpoint", "--health-check-interval-secs",
    "--health-failure-threshold", "--health-success-threshold", "--host", "--policy", "--port", "--prometheus-host",
    "--queue-size", "--queue-timeout-secs", "--request-timeout-secs", "--retry-max-retries",
    "--worker-startup-check-interval", "--worker-startup-timeout-secs", "--worker-urls",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of the wheels, if it is not PyPI as this machine reaches it."""

    ca_bundle: Path | None = None
    index_url: str | None = None


@dataclass(frozen=True, kw_only=True)
class RouterImage:
    tag: str
    version: str
    is_reused: bool


def build(root: Path, engine: docker.Engine, *, image: str, tag: str, source: Source) -> RouterImage:
    """Builds on the appliance's image of that name.

    Raises BuildError if it cannot be built, VerificationError if its packages are not the locked ones.
    """
    below = engine.image(image)
    if below is None:
        message = f"the image to build the router on is not here: {image}"
        raise BuildError(message, hint="python -m images build --only llama-cpu, or --image of one that is here")
    if below.platform != PLATFORM:
        message = f"the router's wheels are locked for {PLATFORM}, and {image} is of {below.platform}"
        raise BuildError(message)
    texts = [(root / path).read_text("utf-8") for path in (LOCK, DOCKERFILE)]
    version, identity = version_of(texts[0]), hashlib.sha256("\0".join((below.id, *texts)).encode()).hexdigest()[:32]
    here = engine.image(tag)
    if here and here.labels.get(IDENTITY_LABEL) == identity:
        return RouterImage(tag=tag, version=version, is_reused=True)
    (root / ARCHIVES).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="router-", dir=root / ARCHIVES) as folder:
        _run(root, install_argv(Path(folder) / "lib", source), "its wheels could not be installed")
        tidy(Path(folder) / "lib")
        _run(root, buildx_argv(image, tag, identity, folder), "its image could not be built")
    return RouterImage(tag=tag, version=version, is_reused=False)


def version_of(text: str) -> str:
    """Returns the locked version of the router."""
    pins = (pin.partition("==") for pin in lock.parse_pins(text))
    return next(version for name, _, version in pins if name == PROGRAM)


def install_argv(target: Path, source: Source) -> tuple[str, ...]:
    """Returns the command. uv takes certificates and index from variables, so that no list of processes shows them."""
    given = {"SSL_CERT_FILE": source.ca_bundle, "UV_DEFAULT_INDEX": source.index_url}
    environment = [f"{variable}={value}" for variable, value in given.items() if value]
    return (
        *(("env", *environment) if environment else ()),
        *(sys.executable, "-m", "uv", "pip", "install", "--target", target.as_posix()),
        *("--no-deps", "--require-hashes", "--only-binary", ":all:", "--link-mode", "copy"),
        *("--python-platform", "x86_64-manylinux_2_28", "--python-version", "3.11", "--requirement", LOCK.as_posix()),
    )


def tidy(lib: Path) -> None:
    """Removes programs, caches and locks of the installation, and makes the rest readable for everybody."""
    shutil.rmtree(lib / "bin", ignore_errors=True)
    (lib / ".lock").unlink(missing_ok=True)
    for path in (lib, *lib.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def buildx_argv(image: str, tag: str, identity: str, context: str) -> tuple[str, ...]:
    return (
        *("docker", "buildx", "build", "--progress", "plain", "--provenance=false", "--sbom=false", "--load"),
        *("--tag", tag, "--file", DOCKERFILE.as_posix(), "--build-arg", f"IMAGE={image}"),
        *("--label", f"{IDENTITY_LABEL}={identity}", "--label", f"org.opencontainers.image.title={tag}"),
        # Its base is a cell's image, but a search for cells by these labels must not find it.
        *(word for label in CELL_LABELS for word in ("--label", f"{label}=")),
        context,
    )


def verify(root: Path, engine: docker.Engine, tag: str) -> None:
    """Checks the image in a hardened container without a network. Raises VerificationError (61).

    Every file is its wheel's, every wheel is locked, and the program knows each flag that it is given.
    """
    python = ("/usr/bin/python3",)
    found = engine.run(tag, ("-c", (root / CHECK).read_text("utf-8")), entrypoint=python)
    wanted = {pin.partition(" ")[0] for pin in lock.parse_pins((root / LOCK).read_text("utf-8"))}
    faults = [line for line in found.lines if "==" not in line] if found.code else []
    faults += sorted(f"{pin} is not the lock's" for pin in wanted ^ {line for line in found.lines if "==" in line})
    told = engine.run(tag, ("-m", "vllm_router.launch_router", "--help"), entrypoint=python)
    words = set(" ".join(told.lines).replace("[", " ").split())
    faults += [f"it has no flag {flag}" for flag in FLAGS if flag not in words]
    if faults:
        message = f"{tag} is not what it must be: {'; '.join(faults[:5])}"
        raise VerificationError(message, hint=f"docker image rm {tag}, and build it anew")


def _run(root: Path, argv: tuple[str, ...], message: str) -> None:
    finished = docker.stream(argv, cwd=root)
    if finished.code != 0:
        words = f"{message}: {' '.join(finished.lines[-3:])}"
        raise BuildError(words, hint="behind an intercepting proxy give its certificates: --ca-bundle FILE")
