"""What kernel-check says of CPU variants, and what `verify` makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from images import docker
from images.errors import VerificationError
from images.matrix.matrix import Variants
from images.proof import cpu_kernels
from images.proof.cpu_kernels import Report, Verdict, parse_verdicts


def row(variant: str, status: str = "ok", **values: Any) -> str:
    known = {
        "cases": 9,
        "worst_nmse": 1e-6,
        "limit": 5e-4,
        "at": "MUL_MAT q4_0 n=8 CPU",
        "signal": None,
        "compared": True,
    }
    return json.dumps({"variant": variant, "status": status, **known, **values})


def verdicts(*rows: str) -> tuple[Verdict, ...]:
    return tuple(parse_verdicts(rows))


def report(*rows: str, built: tuple[str, ...] = ("x64", "haswell", "zen4")) -> Report:
    return Report(built=built, verdicts=verdicts(*rows))


def test_other_lines_are_passed_over() -> None:
    said = ["kernel-check: nothing to compare with", row("x64"), "load_backend: loaded CPU backend"]
    assert [each.variant for each in parse_verdicts(said)] == ["x64"]


def test_what_was_not_executed_is_named_and_no_fault() -> None:
    found = report(row("x64"), row("haswell"), row("zen4", "refused", cases=0))
    assert found.faults == []
    assert found.unproven == ["zen4"]
    assert "unproven, for want of such a CPU: zen4" in found.describe()


def test_an_emulated_cpu_proves_what_this_machine_refuses() -> None:
    here = verdicts(row("x64"), row("haswell", "refused", cases=0), row("zen4", "refused", cases=0))
    emulated = tuple(parse_verdicts([row("haswell")], cpu="Haswell"))
    found = Report(built=("x64", "haswell", "zen4"), verdicts=here + emulated)
    assert found.unproven == ["zen4"]
    assert "emulated: haswell (Haswell)" in found.describe()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (row("haswell", "died", signal="SIGILL"), "haswell: died of SIGILL at MUL_MAT q4_0 n=8 CPU"),
        (row("haswell", "died"), "haswell: died of an exit of its own at MUL_MAT q4_0 n=8 CPU"),
        (row("haswell", "wrong", worst_nmse=0.25), "haswell: NMSE 2.5e-01, the limit is 5e-04: MUL_MAT q4_0 n=8 CPU"),
        (row("haswell", "wrong", worst_nmse=None), "haswell: NMSE no number, the limit is 5e-04: MUL_MAT q4_0 n=8 CPU"),
        (row("haswell", "unloadable"), "haswell: cannot be loaded"),
        (row("haswell", compared=False), "haswell: compared with nothing"),
    ],
)
def test_a_variant_that_is_not_in_order_is_a_fault(bad: str, words: str) -> None:
    assert report(row("x64"), bad).faults == [words]


def test_an_image_of_which_nothing_ran_is_no_proof() -> None:
    assert report(row("x64", "refused"), built=("x64",)).faults == ["no variant could be executed"]


class Machine(docker.Engine):
    """An engine that answers what it is told to."""

    def __init__(self, *lines: str, code: int = 0) -> None:
        self._said = docker.Finished(code=code, lines=lines)
        self.asked: list[tuple[str, ...]] = []

    def run(self, image: str, argv: tuple[str, ...], *, entrypoint: tuple[str, ...] | None = None) -> docker.Finished:
        self.asked.append((*(entrypoint or ()), *argv))
        return self._said

    def remove(self, image_id: str) -> bool:
        self.asked.append(("removed", image_id))
        return True


def ask(engine: docker.Engine) -> Report:
    variants = Variants(offered=("x64", "haswell"), built=("x64", "haswell"))
    return cpu_kernels.query(Path(), engine, image="appliance:x", tag="emulator:x", base="debian", variants=variants)


def test_all_variants_are_asked_in_one_run_against_the_baseline() -> None:
    engine = Machine(row("x64"), row("haswell"))
    assert ask(engine).executed == ["x64", "haswell"]
    assert engine.asked == [
        ("/opt/llama/kernel-check", "--dir", "/opt/llama", "--variant", "x64,haswell", "--reference", "x64")
    ]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (
            Machine("exec: no such file", code=127),
            "ended with 127 before it had judged x64, haswell: exec",
        ),
        (Machine(row("x64")), "before it had judged"),
        (Machine('{"variant": "x64"}', row("haswell")), "something else than its verdicts"),
    ],
)
def test_a_check_that_says_nothing_of_a_variant_is_an_error(engine: Machine, words: str) -> None:
    with pytest.raises(VerificationError, match=words):
        ask(engine)


# A `docker` that builds nothing: it gives the verdicts of a check that the test put beside it, and fails without them.
BUILDX = """#!/bin/sh
for word; do
  case "$word" in
  VARIANT=*) kept="$0-${word#VARIANT=}" ;;
  type=local,dest=*) mkdir "${word#type=local,dest=}" && exec cp "$kept" "${word#type=local,dest=}/verdicts" ;;
  esac
done
"""
EMULATED = Variants(offered=("x64", "haswell"), built=("x64",), emulated={"x64": "Nehalem", "haswell": "Haswell"})


def emulate(folder: Path, patch: pytest.MonkeyPatch, engine: docker.Engine, **kept: str) -> Report:
    for name, text in {"docker": BUILDX, **{f"docker-{variant}": row for variant, row in kept.items()}}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return cpu_kernels.query(folder, engine, image="appliance:x", tag="emulator:x", base="debian", variants=EMULATED)


@pytest.mark.thorough
def test_checks_that_passed_are_taken_from_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Machine(row("x64"))
    found = emulate(tmp_path, monkeypatch, engine, x64=row("x64"), haswell=row("haswell"))
    assert [(each.variant, each.cpu) for each in found.verdicts] == [
        ("x64", None), ("x64", "Nehalem"), ("haswell", "Haswell"),
    ]  # fmt: skip
    assert [argv[0] for argv in engine.asked] == ["/opt/llama/kernel-check"], "of this machine's own CPU alone"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kept",
    [{}, {"x64": ""}, {"x64": row("haswell")}, {"x64": '{"variant": "x64"}'}],
    ids=["fails", "nothing", "another", "torn"],
)
def test_where_one_does_not_pass_all_are_run_and_say_how_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: dict[str, str]
) -> None:
    engine = Machine(row("x64", "died", signal="SIGILL"))
    with pytest.raises(VerificationError, match="before it had judged haswell"):  # this engine speaks of x64 alone
        emulate(tmp_path, monkeypatch, engine, **kept, haswell=row("haswell"))
    emulated = [argv for argv in engine.asked if argv[0] == "/usr/bin/qemu-x86_64-static"]
    assert [argv[argv.index("-cpu") + 1] for argv in emulated] == ["Nehalem", "Haswell"]
    assert engine.asked[-1] == ("removed", "emulator:x")


@pytest.mark.thorough
def test_a_kept_check_that_compared_nothing_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"x64": row("x64"), "haswell": row("haswell", compared=False)}
    assert emulate(tmp_path, monkeypatch, Machine(row("x64")), **kept).faults == ["haswell: compared with nothing"]
