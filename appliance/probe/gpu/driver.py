"""Where the NVIDIA driver's libraries lie, and whether a program has to be told.

They come into a container when it is started. NVIDIA's own runtime puts their folder into the loader's cache as well;
others mount them somewhere and leave the rest to LD_LIBRARY_PATH, which the engine does not inherit.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from appliance.values import dataclass

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
# Where the loader of a Debian image looks without being told (ld.so(8), Debian's multiarch folders).
_DEFAULT = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib")
_SEPARATORS = frozenset(":;$")  # ld.so(8): two of them part folders, and the third begins $ORIGIN and $LIB


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder that some runtime mounts the driver at without telling the loader."""

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
    """`folder` is None where the loader finds the library by itself; else what has to be in LD_LIBRARY_PATH."""

    library: Path | None = None
    folder: Path | None = None
    refused: tuple[str, ...] = ()  # folders that hold it and are not trusted, with the reason


def find(name: str, root: Path, environment: Mapping[str, str], volume: Path | None) -> Found:
    """In the loader's order: what LD_LIBRARY_PATH names, its cache, its own folders; then where runtimes are known to
    put it. Never on `volume`: whoever can write there would run code in every container that shares it."""
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
    """For a child: LD_LIBRARY_PATH with this folder last, and without those that `find` would refuse, since the loader
    does not. An empty one is the folder that a program is started in."""
    found = {name: value for name, value in environment.items() if name != "LD_LIBRARY_PATH"}
    before = environment.get("LD_LIBRARY_PATH", "").split(":")
    folders = [named for named in before if _why_untrusted(named, volume) is None]
    if folder is not None and str(folder) not in folders:
        folders.append(str(folder))
    return found | {"LD_LIBRARY_PATH": ":".join(folders)} if folders else found


def _cached(root: Path, name: str) -> Iterator[Path]:
    """Paths of this library in the loader's cache, which keeps them as strings that end with a zero."""
    try:
        cache = (root / "etc/ld.so.cache").read_bytes()
    except OSError:
        return
    for path in re.findall(rb"(/[^\0\n]{1,4096}/" + re.escape(name.encode()) + rb")\0", cache):
        yield root / path.decode("utf-8", "surrogateescape").lstrip("/")


def _is_there(path: Path) -> bool:
    """Not where this user may not look, and not where the name is too long: there `exists` raises."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _why_untrusted(named: str, volume: Path | None) -> str | None:
    folder = Path(named)
    if not folder.is_absolute():
        return "it is relative, so it depends on where a program is started"
    if _SEPARATORS & set(named):
        return "the dynamic loader would read its name as another one"
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        return f"it cannot be looked into: {error.strerror}"
    if _is_within(folder, volume):
        return f"it is on the volume {volume}, where others may write"
    return "everybody may write there" if mode & stat.S_IWOTH else None


def _is_within(folder: Path, volume: Path | None) -> bool:
    """Also by way of a link."""
    return volume is not None and folder.resolve().is_relative_to(volume.resolve())
