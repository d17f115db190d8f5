"""The real kernel-check on the real CPU variants, whole and with planted faults. Skipped where they are not here."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).parents[2] / ".make" / "engine"
PROGRAM = ENGINE / "kernel-check"
BASELINE = "x64"
RETURN, UNDEFINED = b"\xc3", b"\x0f\x0b"  # x86-64: ret, ud2

pytestmark = pytest.mark.skipif(
    not PROGRAM.exists() or not (ENGINE / f"libggml-cpu-{BASELINE}.so").exists(),
    reason="the engine of the built image is not here, or not for x86-64",
)


def check(folder: Path, *words: str, variant: str = BASELINE) -> tuple[int, list[dict[str, Any]], str]:
    argv = [str(PROGRAM), "--dir", str(folder), "--variant", variant, "--columns", "1,8", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def copied(folder: Path, **variants: str) -> Path:
    """A folder of libraries with variants copied under new names: planted="x64"."""
    for name, source in {BASELINE: BASELINE, **variants}.items():
        shutil.copyfile(ENGINE / f"libggml-cpu-{source}.so", folder / f"libggml-cpu-{name}.so")
    return folder


def plant(library: Path, function: str, code: bytes) -> None:
    """Overwrites the beginning of an exported function in the file."""
    # The loader knows where it lies in memory, and the kernel which byte of the file that is.
    ctypes.CDLL(str(ENGINE / "libggml-base.so.0"), mode=ctypes.RTLD_GLOBAL)
    address = ctypes.cast(getattr(ctypes.CDLL(str(library)), function), ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        place, _, offset, *_, path = line.split()
        first, last = (int(each, 16) for each in place.split("-"))
        if first <= address < last and path == str(library):
            break
    else:
        pytest.fail(f"{function} lies in no mapping of {library}")
    data = bytearray(library.read_bytes())
    at = address - first + int(offset, 16)
    data[at : at + len(code)] = code
    library.unlink()  # it is mapped: a new file, not new bytes under a running program
    library.write_bytes(data)


def test_the_baseline_agrees_with_itself() -> None:
    code, (found,), _ = check(ENGINE, "--types", "q8_0,f16,q4_K", "--kv", "f16,q8_0,q8_0/q4_0")
    assert (code, found["status"], found["compared"], found["worst_nmse"]) == (0, "ok", True, 0)
    assert found["cases"] == 2 * (4 * 3 + 3)


def test_every_variant_that_runs_here_agrees_with_the_baseline() -> None:
    names = sorted(path.stem.removeprefix("libggml-cpu-") for path in ENGINE.glob("libggml-cpu-*.so"))
    code, found, _ = check(ENGINE, "--types", "q4_0,q8_0,q4_K,q6_K,f16", "--kv", "f16,q8_0", variant=",".join(names))
    assert [each["variant"] for each in found] == names
    assert {each["status"] for each in found} <= {"ok", "refused"}
    assert code == (1 if any(each["status"] == "refused" for each in found) else 0)


def test_a_kernel_that_computes_nothing_is_wrong(tmp_path: Path) -> None:
    plant(copied(tmp_path, planted=BASELINE) / "libggml-cpu-planted.so", "ggml_vec_dot_q8_0_q8_0", RETURN)
    code, (found,), _ = check(tmp_path, "--types", "q8_0", "--kv", "f16", variant="planted")
    assert (code, found["status"]) == (1, "wrong")
    assert found["at"].startswith("MUL_MAT")
    assert found["worst_nmse"] is None or found["worst_nmse"] > found["limit"]


def test_a_kernel_of_another_type_is_not_asked(tmp_path: Path) -> None:
    plant(copied(tmp_path, planted=BASELINE) / "libggml-cpu-planted.so", "ggml_vec_dot_q8_0_q8_0", RETURN)
    code, (found,), _ = check(tmp_path, "--types", "q4_K", "--kv", "f16", variant="planted")
    assert (code, found["status"]) == (0, "ok")


def test_an_illegal_instruction_is_named_with_its_place(tmp_path: Path) -> None:
    plant(copied(tmp_path, planted=BASELINE) / "libggml-cpu-planted.so", "ggml_vec_dot_q8_0_q8_0", UNDEFINED)
    code, (found,), _ = check(tmp_path, "--types", "q4_K,q8_0", "--kv", "f16", variant="planted")
    assert (code, found["status"], found["signal"]) == (1, "died", "SIGILL")
    assert found["at"] == "MUL_MAT q8_0 n=1 CPU"


def test_one_bad_variant_says_nothing_of_the_next(tmp_path: Path) -> None:
    plant(copied(tmp_path, planted=BASELINE) / "libggml-cpu-planted.so", "ggml_vec_dot_q8_0_q8_0", UNDEFINED)
    _, found, _ = check(tmp_path, "--types", "q8_0", "--kv", "f16", variant=f"planted,{BASELINE}")
    assert [each["status"] for each in found] == ["died", "ok"]


@pytest.mark.parametrize("kept", [0, 20_000])
def test_a_damaged_file_is_unloadable_or_dies(tmp_path: Path, kept: int) -> None:
    library = copied(tmp_path, planted=BASELINE) / "libggml-cpu-planted.so"
    library.write_bytes(library.read_bytes()[:kept])
    code, (found,), _ = check(tmp_path, "--types", "q8_0", "--kv", "f16", variant="planted")
    assert (code, found["status"]) in {(1, "unloadable"), (1, "died")}


def test_a_missing_file_is_unloadable(tmp_path: Path) -> None:
    code, (found,), said = check(copied(tmp_path), "--types", "q8_0", "--kv", "f16", variant="planted")
    assert (code, found["status"], found["at"]) == (1, "unloadable", "loading libggml-cpu-planted.so")
    assert "libggml-cpu-planted.so" in said


def test_without_the_reference_nothing_is_compared_and_that_is_said() -> None:
    code, (found,), said = check(ENGINE, "--reference", "absent", "--types", "q8_0", "--kv", "f16")
    assert (code, found["status"], found["compared"]) == (0, "ok", False)
    assert "the reference absent did not run" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--types", "q4_9"), "no type of weights is called that: q4_9"),
        (("--kv", "q8_1"), "no type of weights is called that: q8_1"),
        (("--columns", "0"), "--columns takes numbers from 1 to 512: 0"),
        (("--threads", "0"), "--threads is no number of threads"),
        (("--speed", "1"), "unknown flag: --speed"),
        (("--types",), "a value is missing after: --types"),
        (("--variant", "../evil"), "no name of a variant: ../evil"),
    ],
)
def test_bad_words_are_usage(words: tuple[str, ...], said: str) -> None:
    code, found, errors = check(ENGINE, *words)
    assert (code, found) == (2, [])
    assert said in errors
