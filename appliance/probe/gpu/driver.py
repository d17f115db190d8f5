"""Find the NVIDIA driver's libraries, and decide whether child processes need LD_LIBRARY_PATH for them.

The libraries come into a container when it is started. NVIDIA's own runtime also adds their folder to the loader's
cache. Other runtimes only mount them and rely on LD_LIBRARY_PATH, which the engine does not inherit.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from appliance.values import dataclass

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
# Folders that the loader of a Debian image searches by default (ld.so(8), Debian's multiarch folders).
_DEFAULT = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib")
_SEPARATORS = frozenset(":;$")  # ld.so(8): `:` and `;` separate folders, and `$` begins $ORIGIN and $LIB


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder where some runtime mounts the driver without registering it with the loader."""

    folder: str
    used_by: str
    source: str


PLACES = (
    Place(
        folder="usr/local/nvidia/lib64",
        used_by="GKE, and other nodes with Google's device plugin",
        source="pkg.go.dev/github.com/GoogleCloudPlatform/container-engine-accelerators/cmd/nvidia_gpu",
    ),
    Place(
        folder="usr/local/nvidia/lib",
        used_by="nvidia-docker 1 and what follows it",
        source="LD_LIBRARY_PATH of nvidia/cuda:8.0 and later: /usr/local/nvidia/lib:/usr/local/nvidia/lib64",
    ),
    Place(
        folder="usr/lib/wsl/lib",
        used_by="WSL 2 where the folder is mounted by hand; NVIDIA's toolkit adds it to the loader's cache",
        source="github.com/docker/buildx/pull/3320, github.com/microsoft/WSL/issues/8587",
    ),
    Place(
        folder="usr/lib64",
        used_by="hosts of Red Hat's family: libraries keep the host's path",
        source="github.com/docker/buildx/pull/3320: mounts of a CDI specification",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of `find`. `folder` must be added to LD_LIBRARY_PATH; None if the loader finds the library by itself."""

    library: Path | None = None
    folder: Path | None = None
    refused: tuple[str, ...] = ()  # folders that hold the library and are not trusted, with the reason


def find(name: str, root: Path, environment: Mapping[str, str], volume: Path | None) -> Found:
    """Find a library in the loader's order: LD_LIBRARY_PATH, the loader's cache, its default folders, then PLACES.

    Never on `volume`: otherwise whoever can write there could run code in every container that shares it.
    """
    refused: list[str] = []
    unasked = [*_cached(root, name), *(root / folder / name for folder in _DEFAULT)]
    for named in environment.get("LD_LIBRARY_PATH", "").split(":"):
        library = Path(named) / name
        if not named or not _is_there(library):
            continue
        if why := _why_untrusted(named, volume):
            refused.append(f"LD_LIBRARY_PATH names {named}, which holds {name} and is not used: {why}")
            continue
        is_known = any(_is_there(other) and other.samefile(library) for other in unasked)
        return Found(library=library, folder=None if is_known else Path(named), refused=tuple(refused))
    if (known := next((path for path in unasked if _is_there(path)), None)) is not None:
        return Found(library=known, refused=tuple(refused))
    for place in PLACES:
        folder = root / place.folder
        if _is_there(folder / name) and not _is_within(folder, volume):
            return Found(library=folder / name, folder=folder, refused=tuple(refused))
    return Found(refused=tuple(refused))


def reaching(environment: Mapping[str, str], folder: Path | str | None, volume: Path | None) -> dict[str, str]:
    """Return the environment for a child: LD_LIBRARY_PATH without untrusted folders, and with `folder` at its end.

    The loader itself would use every folder named there. An empty name would be the working folder.
    """
    found = {name: value for name, value in environment.items() if name != "LD_LIBRARY_PATH"}
    before = environment.get("LD_LIBRARY_PATH", "").split(":")
    folders = [named for named in before if _why_untrusted(named, volume) is None]
    if folder is not None and str(folder) not in folders:
        folders.append(str(folder))
    return found | {"LD_LIBRARY_PATH": ":".join(folders)} if folders else found


def _cached(root: Path, name: str) -> Iterator[Path]:
    """Yield paths of this library from the loader's cache, where they are stored as zero-terminated strings."""
    try:
        cache = (root / "etc/ld.so.cache").read_bytes()
    except OSError:
        return
    for path in re.findall(rb"(/[^\0\n]{1,4096}/" + re.escape(name.encode()) + rb")\0", cache):
        yield root / path.decode("utf-8", "surrogateescape").lstrip("/")


def _is_there(path: Path) -> bool:
    """True if the path exists. False if this user may not look there or the name is too long; `exists` would raise
    then."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _why_untrusted(named: str, volume: Path | None) -> str | None:
    folder = Path(named)
    if not folder.is_absolute():
        return "it is a relative path"
    if _SEPARATORS & set(named):
        return "its name contains a separator of the dynamic loader"
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if _is_within(folder, volume):
        return f"it is on the volume {volume}, where others may write"
    return "everyone may write there" if mode & stat.S_IWOTH else None


def _is_within(folder: Path, volume: Path | None) -> bool:
    """True if the folder lies on the volume, links resolved."""
    return volume is not None and folder.resolve().is_relative_to(volume.resolve())
