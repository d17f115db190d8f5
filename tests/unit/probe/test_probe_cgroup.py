"""Limits of control groups, from recorded trees of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe.machine.cgroup import (
    Limits,
    parse_cfs_quota,
    parse_cpu_max,
    parse_limit,
    parse_membership,
    parse_mountinfo,
    parse_stat,
    query_limits,
    query_oom_kills,
)
from tests.unit.probe.machine import MIB, STAT_V2, V2_MOUNT, put, v1_mount

CGROUP = "/sys/fs/cgroup"


def test_version_2_in_a_namespace_has_its_limit_at_the_mount(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "/proc/self/mountinfo": V2_MOUNT,
            "/proc/self/cgroup": "0::/\n",
            f"{CGROUP}/cpu.max": "150000 100000\n",
            f"{CGROUP}/memory.max": f"{2048 * MIB}\n",
            f"{CGROUP}/memory.high": "max\n",
            f"{CGROUP}/memory.current": f"{1600 * MIB}\n",
            f"{CGROUP}/memory.stat": STAT_V2,
        },
    )
    # 1,600 MiB are used, of which 500 are cache of files.
    assert query_limits(tmp_path) == Limits(
        quota=1.5, memory_bytes=2048 * MIB, memory_headroom_bytes=(2048 - 1100) * MIB
    )


def test_version_2_takes_the_tightest_of_the_whole_path(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "/proc/self/mountinfo": V2_MOUNT,
            "/proc/self/cgroup": "0::/kubepods/pod1/own\n",
            f"{CGROUP}/kubepods/cpu.max": "400000 100000\n",
            f"{CGROUP}/kubepods/memory.max": f"{16384 * MIB}\n",
            f"{CGROUP}/kubepods/memory.current": f"{16284 * MIB}\n",
            f"{CGROUP}/kubepods/pod1/cpu.max": "max 100000\n",
            f"{CGROUP}/kubepods/pod1/memory.max": "max\n",
            f"{CGROUP}/kubepods/pod1/own/cpu.max": "800000 100000\n",
            f"{CGROUP}/kubepods/pod1/own/memory.max": f"{8192 * MIB}\n",
            f"{CGROUP}/kubepods/pod1/own/memory.current": f"{1024 * MIB}\n",
            f"{CGROUP}/elsewhere/cpu.max": "10000 100000\n",
        },
    )
    # The others of the outer group have left 100 MiB, although the own limit has 7 GiB left.
    assert query_limits(tmp_path) == Limits(quota=4, memory_bytes=8192 * MIB, memory_headroom_bytes=100 * MIB)


@pytest.mark.parametrize("path", ["/../sibling", "/gone", "/"])
def test_version_2_with_a_path_that_is_not_there(tmp_path: Path, path: str) -> None:
    files = {"/proc/self/mountinfo": V2_MOUNT, "/proc/self/cgroup": f"0::{path}\n"}
    put(tmp_path, files | {f"{CGROUP}/cpu.max": "50000 100000", "/sys/fs/sibling/cpu.max": "1 1"})
    assert query_limits(tmp_path).quota == 0.5


def test_version_2_throttles_from_memory_high(tmp_path: Path) -> None:
    files = {"/proc/self/mountinfo": V2_MOUNT, "/proc/self/cgroup": "0::/\n"}
    put(tmp_path, files | {f"{CGROUP}/memory.max": "max", f"{CGROUP}/memory.high": f"{512 * MIB}"})
    assert query_limits(tmp_path) == Limits(memory_bytes=512 * MIB)


def test_version_1_of_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "/proc/self/mountinfo": v1_mount("cpu,cpuacct", "/docker/abc") + v1_mount("memory", "/docker/abc"),
            "/proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
            f"{CGROUP}/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            f"{CGROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            f"{CGROUP}/memory/memory.limit_in_bytes": f"{4096 * MIB}\n",
            f"{CGROUP}/memory/memory.usage_in_bytes": f"{1000 * MIB}\n",
            f"{CGROUP}/memory/memory.stat": (
                f"inactive_file 7\ntotal_inactive_file {300 * MIB}\ntotal_active_file {100 * MIB}\n"
                f"hierarchical_memory_limit {4096 * MIB}\n"
            ),
        },
    )
    assert query_limits(tmp_path) == Limits(
        quota=2.5, memory_bytes=4096 * MIB, memory_headroom_bytes=(4096 - 600) * MIB
    )


def test_version_1_tells_the_limit_of_a_group_above_what_is_mounted(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "/proc/self/mountinfo": v1_mount("memory"),
            "/proc/self/cgroup": "4:memory:/process_api/not-mounted-here\n",
            f"{CGROUP}/memory/memory.limit_in_bytes": "9223372036854771712\n",
            f"{CGROUP}/memory/memory.usage_in_bytes": "1048576\n",
            f"{CGROUP}/memory/memory.stat": f"hierarchical_memory_limit {64 * MIB}\n",
        },
    )
    assert query_limits(tmp_path) == Limits(memory_bytes=64 * MIB, memory_headroom_bytes=63 * MIB)


def test_version_1_without_limits_and_an_empty_version_2_beside_it(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "/proc/self/mountinfo": v1_mount("cpu") + v1_mount("memory") + V2_MOUNT.replace("cgroup ro", "unified ro"),
            "/proc/self/cgroup": "4:memory:/a/b\n1:cpu:/\n0::/\n",
            f"{CGROUP}/cpu/cpu.cfs_quota_us": "-1\n",
            f"{CGROUP}/cpu/cpu.cfs_period_us": "100000\n",
            f"{CGROUP}/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert query_limits(tmp_path) == Limits()


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert query_limits(tmp_path) == Limits()


def test_mounts_and_membership() -> None:
    mounts = parse_mountinfo(
        V2_MOUNT + "nonsense\n" + v1_mount("cpu,cpuacct", "/with\\040space") + "1 2 3 - tmpfs x y\n"
    )
    assert [(mount.root, mount.controllers) for mount in mounts] == [
        ("/", None),
        ("/with space", frozenset({"rw", "cpu", "cpuacct"})),
    ]
    membership = parse_membership("9:name=systemd:/s\n2:cpu,cpuacct:/a:b\n0::/u\nbroken\n")
    assert membership == {"name=systemd": "/s", "cpu": "/a:b", "cpuacct": "/a:b", "": "/u"}


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("50000 100000\n", 0.5), ("", None), ("100000", None), ("0 0", None), ("1 0", None)],
)
def test_cpu_max(text: str, cores: float | None) -> None:
    assert parse_cpu_max(text) == cores


def test_a_limit_that_is_none() -> None:
    assert [parse_limit(text) for text in ("max\n", "9223372036854771712\n", "", "-1", "²", "4096\n")] == [None] * 5 + [
        4096
    ]
    assert parse_cfs_quota("-1\n", "100000\n") is None


@given(text=st.text())
def test_whatever_the_kernel_says_is_no_crash(text: str) -> None:
    assert all(isinstance(number, int) for number in parse_stat(text).values())
    assert all(path for path in parse_membership(text).values())
    assert all(mount.path for mount in parse_mountinfo(text))
    assert (parse_cpu_max(text) or 1) > 0


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({f"{CGROUP}/memory.events": "low 0\nhigh 5\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n"}, 1),
        ({f"{CGROUP}/memory.events": "low 0\noom_kill many\n"}, None),
        ({f"{CGROUP}/memory.events": ""}, None),
        ({}, None),
    ],
)
def test_memory_kills_of_version_2(tmp_path: Path, files: dict[str, str], kills: int | None) -> None:
    put(tmp_path, {"/proc/self/mountinfo": V2_MOUNT, "/proc/self/cgroup": "0::/\n", **files})
    assert query_oom_kills(tmp_path) == kills


def test_memory_kills_of_version_1_are_those_of_the_own_group(tmp_path: Path) -> None:
    """The host also mounts an empty tree of version 2, as many hosts do."""
    put(
        tmp_path,
        {
            "/proc/self/mountinfo": V2_MOUNT.replace(CGROUP, f"{CGROUP}/unified")
            + v1_mount("cpu")
            + v1_mount("memory"),
            "/proc/self/cgroup": "4:memory:/docker/own\n1:cpu:/docker/own\n0::/\n",
            f"{CGROUP}/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
            f"{CGROUP}/memory/docker/own/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        },
    )
    assert query_oom_kills(tmp_path) == 2


def test_memory_kills_of_this_machine_are_a_count_or_unknown() -> None:
    kills = query_oom_kills(Path("/"))
    assert kills is None or kills >= 0
