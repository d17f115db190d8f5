"""What is remembered of the CPU's kernels on the volume, and what the kernel check's words mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engines.llama.kernels.kernel_record import Checked, KernelStore, Record
from appliance.engines.llama.kernels.kernels import (
    Asked,
    asked_of,
    gpu_pattern,
    parse_gpu_report,
    parse_reports,
    query_kernels,
)
from appliance.probe.machine.host import parse_stepping
from tests.builders import machine

CPU = replace(machine().cpu, vendor="GenuineIntel", stepping="6.85.7")
ASKED = Asked(types=("q4_k", "q6_k"), kv_types=("f16",))


def store(folder: Path, *, build: str = "b1", cpu: object = CPU, said: list[str] | None = None) -> KernelStore:
    return KernelStore(folder, build, cpu, (said if said is not None else []).append)  # type: ignore[arg-type]


def test_what_was_seen_is_there_at_the_next_start(tmp_path: Path) -> None:
    first = store(tmp_path)
    assert first.load() == Record()
    first.rule_out("zen4", "it died")
    first.note("haswell", Checked(asked=ASKED))
    found = store(tmp_path).load()
    assert found.ruled_out == {"zen4": "it died"}
    assert found.check_of("haswell", Asked(types=("q4_k",), kv_types=("f16",))) == Checked(asked=ASKED)
    assert found.check_of("haswell", Asked(types=("q4_k",), kv_types=("q8_0",))) is None
    assert found.check_of("x64", ASKED) is None
    assert first.ruled_out(found).where == str(first.path)


def test_checks_add_up(tmp_path: Path) -> None:
    one = store(tmp_path)
    one.note("x64", Checked(asked=ASKED))
    one.note("x64", Checked(asked=Asked(types=("f16",), kv_types=("q8_0",))))
    assert one.load().checked["x64"].asked == Asked(types=("f16", "q4_k", "q6_k"), kv_types=("f16", "q8_0"))
    one.note("x64", Checked(asked=ASKED, problem="it did not end"))
    assert one.load().checked["x64"] == Checked(asked=ASKED, problem="it did not end")
    one.note("x64", Checked(asked=ASKED))
    assert one.load().checked["x64"] == Checked(asked=ASKED)


@pytest.mark.parametrize(
    "other",
    [
        {"build": "b2"},
        {"cpu": replace(CPU, stepping="6.85.4")},
        {"cpu": replace(CPU, vendor="AuthenticAMD")},
        {"cpu": replace(CPU, model_name="another")},
        {"cpu": replace(CPU, isa=("avx2", "avx512f"))},
    ],
)
def test_another_build_or_cpu_is_nothing_to_us(tmp_path: Path, other: dict[str, object]) -> None:
    theirs, ours = store(tmp_path, **other), store(tmp_path)  # type: ignore[arg-type]
    theirs.rule_out("haswell", "it died")
    assert ours.load() == Record()
    theirs.path.rename(ours.path)  # as if the name alone decided
    said: list[str] = []
    assert store(tmp_path, said=said).load() == Record()
    assert said == []
    assert ours.path.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"schema": 1}',
        b"{" * 100_000,
        b'"' + b"x" * 2**20 + b'"',
    ],
)
def test_garbage_is_set_aside_and_never_fatal(tmp_path: Path, data: bytes) -> None:
    said: list[str] = []
    ours = store(tmp_path, said=said)
    ours.path.write_bytes(data)
    assert ours.load(may_set_aside=False) == Record()
    assert ours.path.exists()
    assert ours.load() == Record()
    assert "damaged" in said[0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".corrupt"]
    ours.rule_out("zen4", "it died")
    assert ours.load().ruled_out == {"zen4": "it died"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("ruled_out", []), ("ruled_out", {"x64": 7}), ("checked", {"x64": {}}),
     ("checked", {"x64": {"asked": 1, "problem": None}}),
     ("checked", {"x64": {"asked": {"types": "q", "kv_types": []}, "problem": None}}),
     ("checked", {"x64": {"asked": {"types": [1], "kv_types": []}, "problem": None}})],
)  # fmt: skip
def test_a_file_that_is_ours_by_half_is_set_aside(tmp_path: Path, name: str, value: object) -> None:
    ours = store(tmp_path)
    ours.rule_out("zen4", "it died")
    ours.path.write_text(json.dumps({**json.loads(ours.path.read_text()), name: value}))
    assert ours.load() == Record()
    assert not ours.path.exists()


def test_a_volume_that_takes_nothing_is_told_and_not_fatal(tmp_path: Path) -> None:
    said: list[str] = []
    nowhere = store(tmp_path / "none", said=said)
    assert nowhere.rule_out("zen4", "it died").ruled_out == {"zen4": "it died"}
    assert "cannot be kept" in said[0]


def test_whose_silicon_it_is() -> None:
    intel = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: A Xeon\nstepping\t: 7\n"
    assert parse_stepping(intel) == ("GenuineIntel", "6.85.7")
    arm = "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n"
    assert parse_stepping(arm) == ("0x41", "8.0xd0c.0x3.1")
    assert parse_stepping("") == (None, None)


def row(status: str, signal: str | None = None, nmse: float | None = 1e-9) -> str:
    return json.dumps({"variant": "zen4", "status": status, "cases": 3, "worst_nmse": nmse, "limit": 5e-4,
                       "at": "MUL_MAT q4_0 n=8 AMX", "signal": signal, "compared": True, "seconds": 0.1})  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why_not", "problem"),
    [
        (row("ok"), None, None),
        (row("wrong", nmse=0.5), "wrong results: NMSE 0.5 against x64, 0.0005 allowed (MUL_MAT q4_0 n=8 AMX)", None),
        (row("wrong", nmse=None), "wrong results: no number against x64, 0.0005 allowed (MUL_MAT q4_0 n=8 AMX)", None),
        (row("died", "SIGILL"), "the kernel check died of SIGILL (MUL_MAT q4_0 n=8 AMX)", None),
        (row("died", "SIGBUS"), "the kernel check died of SIGBUS (MUL_MAT q4_0 n=8 AMX)", None),
        (row("died", "SIGKILL"), None, "the kernel check was ended by SIGKILL (MUL_MAT q4_0 n=8 AMX)"),
        (row("died"), None, "the kernel check was ended by an error of its own (MUL_MAT q4_0 n=8 AMX)"),
        (row("refused"), "the engine says that this CPU cannot run it", None),
        (row("unloadable"), "its file cannot be loaded: it is missing or damaged", None),
        (row("tired"), None, "kernel-check reported an unknown status: tired"),
    ],
)
def test_only_what_the_variant_did_counts_against_it(line: str, why_not: str | None, problem: str | None) -> None:
    found = parse_reports(f"noise\n{line}\n{{\n[]\n")["zen4"]
    assert (found.why_not, found.problem) == (why_not, problem)


def test_what_files_call_their_types_is_asked_for() -> None:
    asked = asked_of(["Q4_K", "F32", "I32", "Q8_K", "Q4_K", "MXFP4"], ("q8_0", "f16"))
    assert asked == Asked(types=("f32", "mxfp4", "q4_k"), kv_types=("f16", "q8_0"))
    assert gpu_pattern(asked) == "type_a=(f32|mxfp4|q4_K),|type_K=(f16|q8_0),"


def program(path: Path, body: str) -> Path:
    path.mkdir()
    (path / "kernel-check").write_text(f"#!/bin/sh\n{body}\n")
    (path / "kernel-check").chmod(0o755)
    return path


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("echo no such type >&2; exit 2", "kernel-check ended with 2 without a report of this variant: no such type"),
        ("kill -9 $$", "kernel-check ended with -9 without a report of this variant: it printed nothing"),
        ("sleep 600", "kernel-check did not end within 0.2 s"),
    ],
)
def test_a_check_that_fails_itself_says_nothing_of_the_variant(tmp_path: Path, body: str, problem: str) -> None:
    folder = program(tmp_path / "engine", body)
    found = query_kernels(
        folder, ["x64"], ASKED, cache_dir=tmp_path, threads=2, timeout_s=0.2 if "sleep" in body else 30
    )
    assert [(report.why_not, report.problem) for report in found] == [(None, problem)]


def test_a_check_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    (report,) = query_kernels(tmp_path, ["x64"], ASKED, cache_dir=tmp_path, threads=2)
    assert report.problem == "kernel-check cannot be started: no such file or directory"


GPU = "Backend 1/2: CUDA0\n  MUL_MAT(type_a=q4_K,n=1): {}\n  {}/40 tests passed\n  Backend CUDA0: OK\n2/2 backends\n"


@pytest.mark.parametrize(
    ("text", "code", "why_not", "problem"),
    [
        (GPU.format("\033[1;32mOK\033[0m", 40), 0, None, None),
        (GPU.format("[MUL_MAT] NMSE = 0.9 > 0.0005 \033[1;31mFAIL\033[0m", 39), 1,
         "1 of 40 cases fail: MUL_MAT(type_a=q4_K,n=1)", None),
        ("Backend 1/2: CUDA0\n", -6, "test-backend-ops was killed by signal 6", None),
        ("  0/0 tests passed\n", 0, None, "test-backend-ops ended with 0 and ran no cases: 0/0 tests passed"),
        ("", 1, None, "test-backend-ops ended with 1 and ran no cases: nothing"),
    ],
)  # fmt: skip
def test_what_a_gpu_computes(text: str, code: int, why_not: str | None, problem: str | None) -> None:
    found = parse_gpu_report("CUDA0", text, code)
    assert (found.why_not, found.problem) == (why_not, problem)
