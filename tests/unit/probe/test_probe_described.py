"""A machine read from a file: equal to the probed one, or refused with file and key."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.doctor.bundle import bundle
from appliance.doctor.examine import examine
from appliance.errors import ConfigError
from appliance.probe import GpuSpeed, Speeds, as_document
from appliance.probe.machine.described import MAX_BYTES, parse_machine, read_machine
from appliance.settings import resolve_settings
from tests.golden.machines import MACHINES

SMALLEST = "cpu: {logical: 8}\nmemory: {total_mib: 16000}\n"
CARD = "{name: A, vram_total_mib: 8000%s}"


def with_cards(*rows: str) -> str:
    return f"{SMALLEST}gpus: {{gpus: [{', '.join(rows)}]}}\n"


@pytest.mark.parametrize("name", MACHINES)
def test_what_a_probe_wrote_is_the_machine_that_it_saw(name: str) -> None:
    found = parse_machine(json.dumps(as_document(MACHINES[name])), "m")
    assert found.hardware == MACHINES[name]
    assert found.notes == ()


def test_by_hand_the_least_will_do_and_what_is_assumed_is_said() -> None:
    found = parse_machine(with_cards(CARD % "", CARD % ", index: 7"), "m.yaml")
    hardware = found.hardware
    assert (hardware.cpu.physical, hardware.memory.available_mib, hardware.gpu_requested) == (None, 13952, True)
    assert [(gpu.index, gpu.uuid, gpu.vram_free_mib) for gpu in hardware.gpus.gpus] == [
        (0, "GPU-0", 8000), (7, "GPU-1", 8000),
    ]  # fmt: skip
    keys = ["cpu.isa", "memory.available_mib", "gpus.gpus[0].vram_free_mib", "gpus.gpus[1].vram_free_mib"]
    assert [re.findall(r"m.yaml does not say ([^:]+)", note) for note in found.notes] == [[key] for key in keys]


def test_sockets_are_nodes_in_equal_parts() -> None:
    text = SMALLEST.replace("8}", "8, physical: 4, sockets: 2}")
    found = parse_machine(text, "m.yaml")
    assert [(node.id, node.cpus, node.memory_mib) for node in found.hardware.numa] == [
        (0, (0, 1, 4, 5), 8000), (1, (2, 3, 6, 7), 8000),
    ]  # fmt: skip
    assert (
        "m.yaml does not say numa: taken as 2 nodes with equal parts of CPUs and memory, by cpu.sockets" in found.notes
    )
    one = parse_machine(text.replace("sockets: 2", "sockets: 1"), "m.yaml")
    assert one.hardware.numa == ()


def test_cpus_of_a_node_are_written_as_lscpu_does() -> None:
    found = parse_machine(NODES.replace("0-3", "'0-1,2, 3'"), "m.yaml").hardware
    assert [node.cpus for node in found.numa] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_kinds_of_cores_are_read_and_a_file_of_an_older_probe_has_none() -> None:
    cpu = parse_machine(with_groups(LARGE, SMALL), "m.yaml").hardware.cpu
    assert cpu.capacities == (1.0,) * 4 + (0.27,) * 4
    document = as_document(replace(MACHINES["t4"], cpu=cpu))
    assert parse_machine(json.dumps(document), "m").hardware.cpu == cpu
    del document["cpu"]["groups"], document["cpu"]["groups_problem"]
    assert parse_machine(json.dumps(document), "m").hardware.cpu == replace(cpu, groups=())


def test_a_doctors_bundle_is_the_machine_without_what_it_hides(tmp_path: Path) -> None:
    """GPUs get distinct names again, and the user's settings are reported."""
    settings = resolve_settings({"data_dir": str(tmp_path), "ctx_size": "8192", "facts_dir": str(tmp_path)}, {})
    told = examine(settings, {})
    gpus = MACHINES["a100-mig"].gpus
    speeds = tuple(
        GpuSpeed(uuid=gpu.uuid or "", pinned_gb_s=1.0, pageable_gb_s=1.0, memory_gb_s=1.0, overlapped_pinned_gb_s=1.0,
                 overlapped_dram_gb_s=1.0) for gpu in gpus.gpus
    )  # fmt: skip
    seen = replace(told.hardware, gpus=gpus, speeds=Speeds(dram_gb_s=70.0, gpus=speeds))
    found = parse_machine(bundle(settings, replace(told, hardware=seen), [], []), "b.json")
    assert found.settings == {"ctx_size": "8192"}
    assert "b.json is of a start with --ctx-size 8192: give them as well for the same plan" in found.notes
    names = ("name", "vram_free_mib", "bandwidth_gb_s", "mig_profile")
    for read, probed in zip(found.hardware.gpus.gpus, gpus.gpus, strict=True):
        assert [getattr(read, name) for name in names] == [getattr(probed, name) for name in names]
    uuids = [gpu.uuid for gpu in found.hardware.gpus.gpus]
    assert len(set(uuids)) == len(uuids)
    assert found.hardware.speeds
    assert [speed.uuid for speed in found.hardware.speeds.gpus] == uuids
    assert found.hardware.memory == told.hardware.memory


def with_groups(*rows: str) -> str:
    return f"cpu: {{logical: 8, groups: [{', '.join(rows)}]}}\nmemory: {{total_mib: 16000}}\n"


LARGE, SMALL = "{capacity: 1, cores: 4, cpus: [4, 5, 6, 7]}", "{capacity: 0.27, cores: 4, cpus: [0, 1, 2, 3]}"
NODE = "{id: %d, cpus: %s}"
NODES = f"{SMALLEST}numa: [{NODE % (0, '0-3')}, {NODE % (1, '[4, 5, 6, 7]')}]\n"
REFUSED: list[tuple[str, str]] = [
    (NODES.replace("0-3", "0-x"), "numa[0].cpus: it is not a list of CPUs such as 0-23,48-71: '0-x'"),
    (NODES.replace("0-3", "3-0"), "numa[0].cpus: it is not a list of CPUs"),
    (NODES.replace("0-3", "0-99999"), "numa[0].cpus: it is not a list of CPUs"),
    (NODES.replace("0-3", "0-4"), "numa[1].cpus: another node has CPU 4"),
    (NODES.replace("0-3", "0-2"), "numa: its nodes have 7 CPUs, and cpu.logical is 8"),
    (NODES.replace("id: 1", "id: 0"), "numa[1].id: another node has the same: 0"),
    (f"{NODES}gpus: {{gpus: [{CARD % ', numa_node: 2'}]}}", "gpus.gpus[0].numa_node: no node has the id 2"),
    (NODES.replace("8}", "8, sockets: 2}"), "cpu.sockets: numa already lists the nodes"),
    (SMALLEST.replace("8}", "8, sockets: 0}"), "cpu.sockets: it is not a number from 1 to 16: 0"),
    (SMALLEST.replace("8}", "8, sockets: two}"), "cpu.sockets: it is not a number from 1 to 16: 'two'"),
    (SMALLEST.replace("8}", "8, sockets: 3}"), "cpu.sockets: 8 cores with 8 CPUs do not divide into 3 equal sockets"),
    (SMALLEST.replace("8}", "-8, sockets: 2}"), "cpu.logical: it is negative: -8"),
    ("", "it is empty"),
    ("# only a comment", "it is empty"),
    ("[1]", "it has no keys: [1]"),
    ("{", "it is neither JSON nor YAML: Expecting property name"),
    ("cpu: [", "it is neither JSON nor YAML"),
    ("a: &x [1]\nb: [*x, *x]", "line 2: aliases are not supported"),
    ("a: 1\na: 2", "line 2: a key is listed twice"),
    ('{"cpu": 1, "cpu": 2}', "a key is listed twice: cpu"),
    ("[1, 2]: 3", "or is no text"),
    ("[" * 9000 + "]" * 9000, "recursion"),
    ('{"a":' * 100_000, "recursion"),
    ("cpu: {logical: 8}", "memory: it is missing"),
    ("cpu: {}\nmemory: {total_mib: 1}", "cpu.logical: it is missing"),
    (SMALLEST + "gpu: {}", "gpu: no such key"),
    (SMALLEST.replace("total_mib", "totl_mib"), "memory.totl_mib: no such key"),
    (SMALLEST.replace("8}", "eight}"), "cpu.logical: expected `int`, got `str`"),
    (SMALLEST.replace("8}", "8.5}"), "cpu.logical: expected `int`, got `float`"),
    (SMALLEST.replace("8}", "-8}"), "cpu.logical: it is negative: -8"),
    (SMALLEST.replace("8}", "0}"), "cpu.logical: it is 0"),
    (
        SMALLEST.replace("8}", "999999999999}"),
        "cpu.logical: no machine has that much: 999,999,999,999, more than 8,192",
    ),
    (SMALLEST.replace("8}", "8, physical: 9}"), "cpu.physical: 9 is more than cpu.logical, 8"),
    (SMALLEST.replace("8}", "8, quota: .nan}"), "cpu.quota: no machine has that much: nan"),
    (SMALLEST.replace("16000}", "1e400}"), "memory.total_mib: expected `int`, got `str`"),  # as YAML reads it
    (SMALLEST.replace("16000}", ".nan}"), "memory.total_mib: no machine has that much: nan"),
    ('{"cpu": {"logical": 8}, "memory": {"total_mib": 1e400}}', "memory.total_mib: no machine has that much: inf"),
    (SMALLEST.replace("16000}", "1" + "0" * 40 + "}"), "memory.total_mib: no machine has that much"),
    (SMALLEST.replace("16000}", "16000, available_mib: 16001}"), "available_mib: 16,001 is more than memory.total_mib"),
    (SMALLEST + "gpus: [1]", "gpus: must hold keys"),
    (SMALLEST + "gpus: {gpus: {}}", "gpus.gpus: must be a list"),
    (SMALLEST + "volume: {path: 3}", "volume: path must be a string"),
    (SMALLEST + "volume: {free_mib: much}", "volume.free_mib: it is not a whole number"),
    (with_cards("{name: A}"), "gpus.gpus[0].vram_total_mib: it is missing"),
    (
        with_cards(CARD % ", vram_free_mib: 9000"),
        "vram_free_mib: 9,000 is more than gpus.gpus[0].vram_total_mib",
    ),
    (f"{SMALLEST}gpus: {{driver: banana}}", "gpus.driver: it is not a version: 'banana'"),
    (f"{SMALLEST}gpus: {{driver: '580.65', cuda_driver: 13.x}}", "gpus.cuda_driver: it is not a version: '13.x'"),
    (with_cards(CARD % ", sm: '0'"), "gpus.gpus[0].sm: it is not a compute capability: '0'"),
    (with_cards(CARD % ", sm: 89"), "gpus.gpus[0].sm: expected `str | null`, got `int`"),
    (
        with_cards(CARD % ", is_unified: true"),
        "gpus.gpus[0].is_unified: true, but vram_total_mib is 8,000",
    ),
    (with_cards(CARD % ", index: 0", CARD % ", index: 0"), "gpus.gpus[1].index: another GPU has the same: 0"),
    (with_cards(CARD % ", sm: '89', mig_profile: 1g.5gb"), "mig_profile: compute capability 89 does not support MIG"),
    (with_cards(CARD % ", pcie_width: 32"), "gpus.gpus[0].pcie_width: no PCIe link has 32 lanes, only 1, 2, 4, 8, 16"),
    (
        with_cards(CARD % ", pcie_generation: 9"),
        "gpus.gpus[0].pcie_generation: no machine has that much: 9, more than 7",
    ),
    (SMALLEST + "speeds: {dram_gb_s: 90000}", "speeds.dram_gb_s: no machine has that much: 90,000, more than 4,000"),
    (
        SMALLEST.replace("16000}", "16000, limit_mib: 4000, limit_used_mib: 9000}"),
        "memory.limit_used_mib: 9,000 is more than memory.limit_mib, 4,000",
    ),
    (with_cards(CARD % ", bandwidth_gb_s: 0"), "gpus.gpus[0].bandwidth_gb_s: it is 0"),
    (with_cards(CARD % ", bandwidth_gb_s: fast"), "gpus.gpus[0].bandwidth_gb_s: expected `float | null`"),
    (with_cards(CARD % ", uuid: x", CARD % ", uuid: x"), "gpus.gpus[1].uuid: another GPU has the same: x"),
    (with_cards(CARD % ", nvlink_peers: [3]"), "gpus.gpus[0].nvlink_peers: no other GPU has the index 3"),
    (with_cards(*[CARD % ""] * 65), "gpus.gpus: 65 entries, at most 64 are allowed"),
    (SMALLEST + "a: " + "b" * 2**17, "as YAML it is larger than 64 KiB"),
    (with_groups(LARGE), "cpu.groups: they have 4 cores, and the CPU has 8"),
    (with_groups(SMALL, LARGE), "cpu.groups[1].capacity: groups must be in order, the fastest first"),
    (
        with_groups("{capacity: 1024, cores: 8}"),
        "cpu.groups[0].capacity: 1024 is more than 1, the capacity of the fastest core",
    ),
    (with_groups("{capacity: 0, cores: 8}"), "cpu.groups[0].capacity: it is 0"),
    (with_groups(LARGE, "{capacity: -1, cores: 4}"), "cpu.groups[1].capacity: it is negative"),
    (with_groups(LARGE, "{cores: 4}"), "cpu.groups[1].capacity: it is missing"),
    (with_groups(LARGE, "{capacity: 0.2, cores: 4, cpus: [0, 1, 2]}"), "3 CPUs are too few for 4 cores"),
    (with_groups(LARGE, LARGE), "cpu.groups: CPU 4 is listed twice"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_a_machine_that_cannot_be_is_10_with_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_machine(str(path))
    assert caught.value.message.startswith(f"machine file {path}: ")
    assert words in caught.value.message
    assert caught.value.message.isprintable()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"\xff\xfe\x00", "it is not text"), (SMALLEST.encode().ljust(MAX_BYTES + 1), "it is larger than 4 MiB")],
    ids=["no text", "too large"],
)
def test_what_is_no_text_or_too_large_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"machine file .*: {words}"):
        read_machine(str(path))


@pytest.mark.parametrize("name", ["none.json", ".", "a\0b", "x" * 300])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_machine(name)
    assert caught.value.message.isprintable()


def test_a_name_that_is_misspelt_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_machine(with_cards("{name: A, vram_totl_mib: 8000}"), "m")
    assert caught.value.hint == "perhaps you meant 'vram_total_mib'"


@pytest.mark.parametrize("text", [with_cards(CARD % ", sm: 89"), SMALLEST + "gpus: {driver: 580.95}"])
def test_a_text_that_yaml_reads_as_a_number_wants_quotation_marks(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_machine(text, "m")
    assert caught.value.hint == "put the value in quotation marks"


def test_a_file_that_was_cut_is_refused() -> None:
    text = json.dumps(as_document(MACHINES["a100-mig"]))
    for end in range(0, len(text) - 1, 97):
        with pytest.raises(ConfigError):
            parse_machine(text[:end], "m")


@pytest.mark.thorough
def test_whatever_a_value_becomes_it_is_a_machine_or_refused() -> None:
    document: dict[str, Any] = as_document(MACHINES["a100-mig"])
    others: tuple[Any, ...] = (None, -1, 0, "x", [], {}, [{}], True, 1e300)
    said = {outcome(document, path, value) for path in paths(document) for value in others}
    assert said == {"a machine", "refused"}


def outcome(document: dict[str, Any], path: tuple[Any, ...], value: object) -> str:
    changed = json.loads(json.dumps(document))
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    try:
        parse_machine(json.dumps(changed), "m")
    except ConfigError as error:
        return "refused" if error.message.startswith("machine file m: ") else error.message
    return "a machine"


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [path for key, each in rows for path in ((*at, key), *paths(each, (*at, key)))]
