"""The report on an engine's wheels: what it says, what it is held to, and planted faults."""

from __future__ import annotations

import json
import stat
import struct
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from images import __main__ as command
from images import rows
from images.errors import UsageError, VerificationError
from images.matrix import matrix
from images.matrix.matrix import Cell, Platform, SmForm
from images.proof import gate, wheel_gaps
from images.proof.gate import Kernel, Library
from images.proof.wheel_gaps import Wheel

CELLS = [cell for cell in matrix.load(Path(__file__).parents[4]).cells if not cell.engine.is_compiled]
CHIPS = [(cell, form) for cell in CELLS for form in cell.sm_forms]
NAMES = st.sets(st.text(alphabet="_Zab1", min_size=1, max_size=6), max_size=12)

# Of SM 90: one kernel runs, one is compiled by the driver, one is for another chip.
KERNELS = (
    Kernel(name="_Z3runs", sass=("75", "90a"), ptx=()),
    Kernel(name="_Z3made", sass=("80",), ptx=("80",)),
    Kernel(name="_Z5never", sass=("100f",), ptx=()),
)


@pytest.fixture
def hopper() -> Cell:
    return next(cell for cell in CELLS if cell.id == "vllm-cu130")


@pytest.fixture
def sm90(hopper: Cell) -> SmForm:
    return next(form for form in hopper.sm_forms if form.sm == "90")


def _wheel(platform: Platform, kernels: tuple[Kernel, ...] = KERNELS) -> Wheel:
    library = Library(path="vllm/_C.abi3.so", kernels=kernels)
    return Wheel(name="vllm.whl", sha256="0" * 64, platform=platform, is_engine=True, libraries=(library,))


def _torch() -> Wheel:
    library = Library(path="torch/lib/libtorch_cuda.so", targets={"80": 2, "90a": 1})
    name = "torch.whl"
    return Wheel(name=name, sha256="1" * 64, platform="linux/amd64", is_engine=False, libraries=(library,))


@pytest.mark.parametrize(("cell", "form"), CHIPS)
def test_every_chip_of_a_wheel_has_its_report(project: Path, cell: Cell, form: SmForm) -> None:
    path = project / wheel_gaps.path_for(cell, form.sm)
    platforms = [platform for platform in cell.platforms if form.is_for(platform)]
    data: Any = rows.load(path)
    assert all(sha256 in data["source"] for sha256 in (cell.engine.source.wheels[each] for each in platforms))
    for platform in platforms:
        known = gate.load_known_gaps(path, platform)
        assert sum(count.kernels for count in known.counts) > 10_000
        assert all(count.native + count.ptx <= count.kernels for count in known.counts)
        assert any(count.native for count in known.counts)


@pytest.mark.parametrize(("cell", "form"), CHIPS)
def test_the_matrix_names_the_libraries_that_a_driver_compiles(project: Path, cell: Cell, form: SmForm) -> None:
    known = gate.load_known_gaps(project / wheel_gaps.path_for(cell, form.sm))
    assert set(form.ptx) == {count.library.partition(".")[0] for count in known.counts if count.ptx}


def test_every_report_is_a_chips(project: Path) -> None:
    expected = {wheel_gaps.path_for(cell, form.sm).name for cell, form in CHIPS}
    assert {path.name for path in (project / wheel_gaps.FOLDER).iterdir()} == expected


def test_no_attention_kernel_of_the_wheel_runs_below_sm_80(project: Path) -> None:
    """Why SM 75 is served by Triton's attention alone."""
    counts = gate.load_known_gaps(project / "images/gaps/vllm-cu130-sm75.yaml").counts
    attention = [count for count in counts if count.library.startswith(("_vllm_fa", "_flashmla"))]
    assert len(attention) == 4
    assert all(count.native == count.ptx == 0 for count in attention)


@pytest.mark.parametrize(
    ("sm", "native", "ptx"),
    [(75, 1, 0), (80, 1, 0), (86, 1, 0), (89, 1, 0), (90, 1, 1), (100, 1, 1), (103, 1, 1), (120, 0, 1), (87, 0, 1)],
)
def test_a_kernel_is_native_compiled_or_never_run(sm: int, native: int, ptx: int) -> None:
    count = wheel_gaps.describe(Library(path="x.so", kernels=KERNELS), sm).count
    assert (count.native, count.ptx) == (native, ptx)


@pytest.mark.parametrize(
    ("target", "sm", "is_made"), [("80", 120, True), ("90", 80, False), ("90a", 100, False), ("100f", 103, True)]
)
def test_a_driver_makes_code_of_older_ptx(target: str, sm: int, is_made: bool) -> None:
    assert gate.compiles_for(target, sm) is is_made


@given(names=NAMES, others=NAMES)
def test_globs_match_the_gaps_and_nothing_else(names: set[str], others: set[str]) -> None:
    known = gate.KnownGaps(kernels=tuple(("x.so", glob) for glob in wheel_gaps.shortest_globs(names, others)))
    assert all(known.admits("a/x.so", name) for name in names)
    assert not any(known.admits("a/x.so", name) for name in others - names)


def test_a_report_declares_what_it_saw_and_nothing_else(hopper: Cell, sm90: SmForm) -> None:
    wheels = [_wheel("linux/amd64"), _wheel("linux/arm64", KERNELS[:2]), _torch()]
    text = wheel_gaps.report(hopper, sm90, wheels)
    assert "listed:  #" in text
    assert '{"80": 2, "90a": 1}' in text
    data = yaml.safe_load(text)
    for wheel in wheels[:2]:
        known = gate.parse_known_gaps(data, where="x", platform=wheel.platform)
        assert gate.judge(wheel.libraries, 90, known).faults == []
    foreign = gate.judge(wheels[0].libraries, 90, gate.parse_known_gaps(data, where="x", platform="linux/arm64"))
    assert "_C.abi3.so: 3 kernels, 1 native, 1 from PTX, known were 2 kernels, 1 native, 1 from PTX" in foreign.faults


def test_a_cell_that_claims_native_fails_on_the_first_kernel() -> None:
    faults = gate.judge(_wheel("linux/amd64").libraries, 90).faults
    assert faults[0] == "vllm/_C.abi3.so: _Z3made has only sm_80, PTX of compute_80"


def test_planted_changes_of_a_wheel_are_caught(hopper: Cell, sm90: SmForm) -> None:
    text = wheel_gaps.report(replace(hopper, platforms=("linux/amd64",)), sm90, [_wheel("linux/amd64")])
    known = gate.parse_known_gaps(yaml.safe_load(text), where="x", platform="linux/amd64")

    def faults(*kernels: Kernel) -> list[str]:
        return gate.judge([Library(path="lib/vllm/_C.abi3.so", kernels=kernels)], 90, known).faults

    assert faults(*KERNELS) == []
    lost = faults(Kernel(name="_Z3runs", sass=("80",), ptx=()), *KERNELS[1:])
    assert lost[0] == "lib/vllm/_C.abi3.so: _Z3runs has only sm_80"
    gained = faults(*KERNELS[:2], Kernel(name="_Z5never", sass=("90",), ptx=()))
    assert gained[0] == "known gap is none any more: _C.abi3.so: _Z5*"
    # A glob admits one more of its kind; the count does not.
    more = faults(*KERNELS, Kernel(name="_Z5never_again", sass=("100f",), ptx=()))
    assert more == ["_C.abi3.so: 4 kernels, 1 native, 1 from PTX, known were 3 kernels, 1 native, 1 from PTX"]
    new = Library(path="vllm/_new.so", kernels=KERNELS[:1])
    assert gate.judge([*_wheel("linux/amd64").libraries, new], 90, known).faults == [
        "_new.so: 1 kernels, 1 native, 0 from PTX, and nobody counted it before"
    ]
    assert "_C.abi3.so: is not there" in gate.judge([new], 90, known).faults[-2]


def test_a_platform_whose_wheel_was_not_given_is_named(hopper: Cell, sm90: SmForm) -> None:
    with pytest.raises(UsageError, match="the wheel of vLLM for linux/arm64 was not given") as caught:
        wheel_gaps.report(hopper, sm90, [_wheel("linux/amd64")])
    assert caught.value.hint == f"its sha256 is {hopper.engine.source.wheels['linux/arm64']}"


def test_a_file_is_known_by_its_hash(tmp_path: Path, hopper: Cell) -> None:
    file = tmp_path / "torch-2.14.0-cp311-cp311-manylinux_2_28_aarch64.whl"
    file.write_bytes(b"wheel")
    digest = sha256(b"wheel").hexdigest()
    found = wheel_gaps.identify(file, hopper.engine.source, f"torch==2.14.0 --hash=sha256:{digest}")
    assert (found.platform, found.is_engine) == ("linux/arm64", False)
    own = replace(hopper.engine.source, wheels={"linux/amd64": digest})
    assert wheel_gaps.identify(file, own, "").is_engine
    with pytest.raises(UsageError, match=f"not a wheel of images/locks/vllm-cu130.txt: .*: sha256 {digest}"):
        wheel_gaps.identify(file, hopper.engine.source, "")
    with pytest.raises(UsageError, match="wheel cannot be read"):
        wheel_gaps.identify(tmp_path, hopper.engine.source, "")


def test_libraries_are_read_out_of_a_wheel(tmp_path: Path) -> None:
    file, tool = tmp_path / "x.whl", tmp_path / "cuobjdump"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("vllm/_C.abi3.so", _library(90))
        archive.writestr("vllm/_C.py", "")
        archive.writestr("../escape.so", _library(90))
    symbol = "FUNC          GLOBAL  DEFAULT    ENTRY                                sum"
    _write_tool(tool, f"printf 'Fatbin elf code:\\narch = sm_90\\n{symbol}\\n'")
    identity = wheel_gaps.Identity(sha256="0" * 64, platform="linux/amd64", is_engine=True)
    wheel = wheel_gaps.read_wheel(tool, file, identity)
    assert [library.path for library in wheel.libraries] == ["vllm/_C.abi3.so", "../escape.so"]
    assert wheel.libraries[0].kernels == (Kernel(name="sum", sass=("90",), ptx=()),)
    assert not (tmp_path.parent / "escape.so").exists()
    file.write_bytes(b"no wheel")
    with pytest.raises(VerificationError, match="wheel cannot be unpacked"):
        wheel_gaps.read_wheel(tool, file, identity)


def test_faults_name_what_is_missing_and_what_differs(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("old")
    texts = {Path("a.yaml"): "new", Path("b.yaml"): "new"}
    assert wheel_gaps.faults(tmp_path, texts) == ["a.yaml: is not what the wheels say", "b.yaml: missing"]
    (tmp_path / "a.yaml").write_text("new")
    assert wheel_gaps.faults(tmp_path, {Path("a.yaml"): "new"}) == []


def test_the_verb_wants_cells_from_wheels_and_every_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["gaps", "--only", "llama-*", "--dry-run"]) == 2
    assert "is of an engine from wheels: llama-*" in capsys.readouterr().err
    assert command.main(["gaps", "--only", "vllm-*", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == "images/gaps/vllm-cu130-sm75.yaml"
    tool = tmp_path / "cuobjdump"
    _write_tool(tool, "exit 0")
    assert command.main(["gaps", "--only", "vllm-*", "--check", "--cuobjdump", str(tool)]) == 2
    assert "the wheel of vLLM for linux/amd64 was not given" in capsys.readouterr().err


def _fatbin(chip: int) -> bytes:
    header = struct.pack("<HHIQ12x", 2, 0x101, 64, 16) + struct.pack("<I", chip)
    body = header.ljust(64, b"\0") + b"\xff" * 16
    return struct.pack("<IHHQ", gate.FATBIN_MAGIC, 1, 16, len(body)) + body


def _library(chip: int) -> bytes:
    """A 64-bit shared library: a table for the linker, and a section with a fat binary."""
    names, body = b"\0.nv_fatbin\0", _fatbin(chip)
    at = 64 + 56 + 16
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        3,
        62,
        1,
        0,
        64,
        at + len(body) + len(names),
        0,
        64,
        56,
        1,
        64,
        3,
        2,
    )
    segment = struct.pack("<IIQQQQQQ", 2, 4, 64 + 56, 0, 0, 16, 16, 8) + b"\1".ljust(16, b"\0")
    rows = [(0, 0, 0, 0), (1, 1, at, len(body)), (0, 3, at + len(body), len(names))]
    sections = b"".join(struct.pack("<IIQQQQ24x", name, kind, 0, 0, start, size) for name, kind, start, size in rows)
    return header + segment + body + names + sections


def _write_tool(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
