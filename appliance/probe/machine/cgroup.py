"""The limits that control groups set for this process, versions 1 and 2.

A limit at any level from the process's own group up to the root of the mount applies, so every level is read and the
tightest one counts. Levels above the mount's root are not visible from a container; only version 1's memory controller
reports them (`hierarchical_memory_limit`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from appliance.values import dataclass

# Version 1 writes "no limit" as the largest multiple of the page size; values near it are no limit either.
NO_LIMIT_BYTES = 1 << 60
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One mounted hierarchy. `controllers` is None for version 2, where one tree has all controllers."""

    root: str  # group of the hierarchy that is mounted, as seen from our cgroup namespace
    path: str
    controllers: frozenset[str] | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits; None means no limit. `memory_headroom_bytes` is the smallest remainder of all limited levels."""

    quota: float | None = None
    memory_bytes: int | None = None
    memory_headroom_bytes: int | None = None


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Parse the cgroup mounts of /proc/self/mountinfo; format in proc(5)."""
    mounts = []
    for line in text.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.split(" ")
        if not separator or len(fields) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = None if kind[0] == "cgroup2" else frozenset(kind[2].split(","))
        mounts.append(Mount(root=_unescaped(fields[3]), path=_unescaped(fields[4]), controllers=controllers))
    return tuple(mounts)


def parse_membership(text: str) -> dict[str, str]:
    """Parse /proc/self/cgroup into controller -> path; the empty controller is version 2."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number and path:
            paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def parse_cpu_max(text: str) -> float | None:
    """Parse version 2's cpu.max, "200000 100000" or "max 100000", into cores; None means no limit."""
    quota, _, period = text.strip().partition(" ")
    return parse_cfs_quota(quota, period)


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """Convert version 1's cpu.cfs_quota_us and cpu.cfs_period_us into cores; None for no limit or other text."""
    quota_us, period_us = parse_count(quota), parse_count(period)
    return quota_us / period_us if quota_us and period_us else None


def parse_limit(text: str) -> int | None:
    """Parse version 1's memory.limit_in_bytes, or version 2's memory.max and memory.high; None means no limit."""
    limit = parse_count(text)
    return limit if limit is not None and limit < NO_LIMIT_BYTES else None


def parse_stat(text: str) -> dict[str, int]:
    """Parse memory.stat; lines that are not a name and a number are skipped."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal() and pair[1].isascii()}


def parse_count(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 32 else None


def query_limits(root: Path) -> Limits:
    """Read the limits of this process from /proc and /sys below `root`. Without cgroup mounts there are no limits."""
    mounts = parse_mountinfo(_text(root / "proc/self/mountinfo"))
    paths = parse_membership(_text(root / "proc/self/cgroup"))
    quotas: list[float | None] = []
    memory: list[tuple[int | None, int | None]] = []
    for mount in mounts:
        if mount.controllers is None:
            for level in _levels(root, mount, paths.get("", "/")):
                quotas.append(parse_cpu_max(_text(level / "cpu.max")))
                memory.append(_memory_v2(level))
        if mount.controllers is not None and "cpu" in mount.controllers:
            for level in _levels(root, mount, paths.get("cpu", "/")):
                quotas.append(parse_cfs_quota(_text(level / "cpu.cfs_quota_us"), _text(level / "cpu.cfs_period_us")))
        if mount.controllers is not None and "memory" in mount.controllers:
            memory += [_memory_v1(level) for level in _levels(root, mount, paths.get("memory", "/"))]
    return Limits(
        quota=min((quota for quota in quotas if quota is not None), default=None),
        memory_bytes=min((limit for limit, _ in memory if limit is not None), default=None),
        memory_headroom_bytes=min((headroom for _, headroom in memory if headroom is not None), default=None),
    )


def query_oom_kills(root: Path) -> int | None:
    """Number of processes of this process's group that a memory killer has ended; None if nothing counts them.

    Version 2 includes the groups below, version 1 does not. Both count kills caused by a shortage of the whole machine.
    """
    paths = parse_membership(_text(root / "proc/self/cgroup"))
    for mount in parse_mountinfo(_text(root / "proc/self/mountinfo")):
        if mount.controllers is None:
            file, path = "memory.events", paths.get("", "/")
        elif "memory" in mount.controllers:
            file, path = "memory.oom_control", paths.get("memory", "/")
        else:
            continue
        own = next(_levels(root, mount, path))
        if (kills := parse_stat(_text(own / file)).get("oom_kill")) is not None:
            return kills
    return None


def _levels(root: Path, mount: Mount, path: str) -> Iterator[Path]:
    """Yield the folders from the process's own group up to the root of the mount."""
    top = root / mount.path.lstrip("/")
    below = _below(mount.root, path)
    own = top / below
    # A container may see the host's path although its mount begins at its own group; then the mount's root is its
    # group.
    if below and not own.is_dir():
        own = top
    while own != top:
        yield own
        own = own.parent
    yield top


def _below(mount_root: str, path: str) -> str:
    """Return `path` relative to the mounted root; "" if it lies outside, as `/..` does in a cgroup namespace."""
    if ".." in PurePosixPath(path).parts:
        return ""
    prefix = mount_root.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else "" if path == mount_root else path.lstrip("/")


def _memory_v2(level: Path) -> tuple[int | None, int | None]:
    # Above memory.high a group is throttled until it hardly runs, so planning treats it as a limit like memory.max.
    bounds = (parse_limit(_text(level / name)) for name in ("memory.max", "memory.high"))
    limit = min((bound for bound in bounds if bound is not None), default=None)
    if limit is None:
        return None, None
    stat = parse_stat(_text(level / "memory.stat"))
    return limit, _headroom(limit, parse_count(_text(level / "memory.current")), stat, prefix="")


def _memory_v1(level: Path) -> tuple[int | None, int | None]:
    stat = parse_stat(_text(level / "memory.stat"))
    limits = (parse_limit(_text(level / "memory.limit_in_bytes")), stat.get("hierarchical_memory_limit"))
    limit = min((bound for bound in limits if bound is not None and bound < NO_LIMIT_BYTES), default=None)
    if limit is None:
        return None, None
    return limit, _headroom(limit, parse_count(_text(level / "memory.usage_in_bytes")), stat, prefix="total_")


def _headroom(limit: int, used: int | None, stat: dict[str, int], *, prefix: str) -> int | None:
    if used is None:
        return None
    reclaimable = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return limit - max(0, used - reclaimable)


def _text(path: Path) -> str:
    """Return the file's text, or "" if it cannot be read: a missing controller sets no limit."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _unescaped(text: str) -> str:
    for escape, character in _ESCAPES.items():
        text = text.replace(escape, character)
    return text
