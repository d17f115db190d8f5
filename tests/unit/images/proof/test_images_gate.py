"""What cuobjdump says, the family rule, and the judgement; the files themselves are met by the container tests."""

from __future__ import annotations

import json
import stat
import struct
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from images import __main__ as command
from images.errors import MatrixError, VerificationError
from images.proof import gate
from images.proof.gate import Element, Kernel, KnownGaps, Library

# The chips of CUDA 13.4 and of 12.x; 87 and 110 are Tegra's.
CHIPS = (70, 75, 80, 86, 87, 88, 89, 90, 100, 103, 107, 110, 120, 121)
FAMILIES = ((70, 75), (80, 86, 88, 89), (90,), (100, 103, 107), (120, 121))
# CUDA Programming Guide, table Family-Specific Compatibility: the whole of it.
FAMILY_TABLE = {"100f": {100, 103}, "103f": {103}, "110f": {110}, "120f": {120, 121}, "121f": {121}}
# The same guide, 6.1.2, and the compatibility guides of Ampere, Hopper and Blackwell.
PLAIN_TABLE = {
    "70": {70, 75},
    "75": {75},
    "80": {80, 86, 88, 89},
    "86": {86, 88, 89},
    "87": {87},
    "89": {89},
    "90": {90},
    "100": {100, 103, 107},
    "103": {103, 107},
    "110": {110},
    "120": {120, 121},
    "121": {121},
}

SYMBOLS = """
Fatbin elf code:
================
arch = sm_120f
code version = [1,8]
host = linux
compile_size = 64bit

symbols:
OBJECT        WEAK    DEFAULT    -                                 U  .nv.reservedSmem.offset0
NOTYPE        WEAK    DEFAULT    RESERVED_SHARED                      __nv_reservedSMEM_offset_0_alias
NOTYPE        LOCAL   INTERNAL   -                                 U  
FUNC          GLOBAL  DEFAULT    ENTRY                                sum
FUNC          LOCAL   DEFAULT    ENTRY                                _ZN12_GLOBAL__N_15applyEPfi
FUNC          LOCAL   DEFAULT    -                                    $_ZN12_GLOBAL__N_15applyEPfi$_Z4polyf

Fatbin lto code:
================
arch = sm_80
compressed

Fatbin ptx code:
================
arch = sm_80
code version = [9,0]
host = linux
compressed
ptxasOptions = 

.version 9.0
.target sm_80
.visible .entry sum(
.param .u64 sum_param_0
)
{
ret;
}
.weak .entry _Z5scaleIfEvPT_(
"""  # noqa: W291 - as the tool writes it


@pytest.mark.parametrize(("target", "chips"), [*FAMILY_TABLE.items(), *PLAIN_TABLE.items()])
def test_the_rule_is_nvidias_table(target: str, chips: set[int]) -> None:
    known = set(CHIPS) - ({107} if target.endswith("f") else set())  # newer than that table
    assert {chip for chip in known if gate.runs_natively(target, chip)} == chips


@given(st.sampled_from(CHIPS), st.sampled_from(CHIPS))
def test_an_a_target_runs_on_its_chip_alone(target: int, chip: int) -> None:
    assert gate.runs_natively(f"{target}a", chip) == (target == chip)


@given(st.sampled_from(CHIPS), st.sampled_from("af"), st.sampled_from(CHIPS))
def test_a_suffix_never_widens(target: int, suffix: str, chip: int) -> None:
    assert gate.runs_natively(str(target), chip) or not gate.runs_natively(f"{target}{suffix}", chip)


@given(st.sampled_from(CHIPS), st.sampled_from(CHIPS), st.sampled_from(["", "a", "f"]))
def test_never_across_majors_and_never_downwards(target: int, chip: int, suffix: str) -> None:
    may_run = target // 10 == chip // 10 and target <= chip
    assert may_run or not gate.runs_natively(f"{target}{suffix}", chip)


@given(st.sampled_from(FAMILIES).flatmap(lambda family: st.tuples(*[st.sampled_from(family)] * 3)))
def test_what_runs_on_a_chip_runs_on_the_next_of_its_family(chips: tuple[int, int, int]) -> None:
    target, chip, later = sorted(chips)
    for suffix in ("", "f"):
        assert gate.runs_natively(f"{target}{suffix}", chip)
        assert gate.runs_natively(f"{target}{suffix}", later)


@pytest.mark.parametrize("word", ["sm_", "120b", "", "90aa", "sm_9", "ninety"])
def test_something_that_is_no_target_is_refused(word: str) -> None:
    with pytest.raises(VerificationError, match="not an SM target"):
        gate.parse_target(word)


def test_kernels_are_the_entries_and_the_f_is_kept() -> None:
    assert gate.parse_elements(SYMBOLS.splitlines()) == [
        Element(kind="elf", target="120f", kernels=frozenset({"sum", "_ZN12_GLOBAL__N_15applyEPfi"})),
        Element(kind="ptx", target="80", kernels=frozenset({"sum", "_Z5scaleIfEvPT_"})),
    ]


def test_a_listing_counts_cubins_by_target() -> None:
    lines = [
        "ELF file    1: libcublas.1.sm_90.cubin",
        "ELF file   12: x.2.sm_90.cubin",
        "ELF file 3: x.3.sm_103a.cubin",
    ]
    assert gate.parse_listing([*lines, "something else"]) == {"90": 2, "103a": 1}


def test_units_of_a_fatbin_file() -> None:
    data = _fatbin((2, 80), (1, 80)) + b"\0" * 8 + _fatbin((2, 90), (9, 90))
    assert gate.parse_units(data) == [[("elf", 80), ("ptx", 80)], [("elf", 90)]]


def test_an_executables_code_comes_before_an_objects() -> None:
    data = _elf({"__nv_relfatbin": _fatbin((1, 80)), ".nv_fatbin": _fatbin((2, 90))})
    assert gate.parse_units(data) == [[("elf", 90)]]
    assert gate.parse_units(_elf({"__nv_relfatbin": _fatbin((1, 80))})) == [[("ptx", 80)]]
    assert gate.parse_units(_elf({".text": b"x" * 64})) == []


def test_code_for_link_time_optimization_fails_beside_a_good_file(tmp_path: Path) -> None:
    """`nvcc -gencode arch=compute_90,code=lto_90`: kind 8 in the file, `nvvm` in cuobjdump's words."""
    lto = _query(tmp_path, _elf({"__nv_relfatbin": _fatbin((8, 90))}), "Fatbin nvvm code:\narch = sm_90")
    good = _library(sass=("90",))
    assert gate.judge([good], 90).faults == []
    assert gate.judge([good, lto], 90).faults == ["x.o: 1 units have only code for link-time optimization"]
    assert gate.describe(lto, 90) == "gaps x.o  not linked"


@given(st.data())
def test_a_file_that_is_cut_off_anywhere_has_no_units(data: st.DataObject) -> None:
    whole = _elf({".nv_fatbin": _fatbin((2, 90)), ".text": b"x" * 32})
    assert gate.parse_units(whole) == [[("elf", 90)]]
    end = data.draw(st.integers(4, len(whole) - 1))
    with pytest.raises(struct.error):
        gate.parse_units(whole[:end])


@pytest.mark.parametrize("end", [0, 40, 300])
def test_what_is_cut_off_is_named_though_the_tool_finds_no_code_in_it(tmp_path: Path, end: int) -> None:
    whole = _elf({".nv_fatbin": _fatbin((2, 90)), ".text": b"x" * 200})
    with pytest.raises(VerificationError, match=rf"^x\.o is cut off at {end} bytes$") as caught:
        _query(tmp_path, whole[:end], "")
    assert caught.value.exit_code == 61


def _query(folder: Path, data: bytes, said: str) -> Library:
    """Query a file of `data` with a cuobjdump that prints `said`; an empty `said` means that it finds no device
    code."""
    file, tool = folder / "x.o", folder / "cuobjdump"
    file.write_bytes(data)
    none = "echo 'File does not contain device code' >&2; exit 255"
    _write_tool(tool, f"cat <<'END'\n{said}\nEND" if said else none)
    return gate.query_library(tool, file, name="x.o")


def test_unknown_bytes_are_no_fatbin() -> None:
    with pytest.raises(VerificationError, match="unknown bytes among the fat binaries"):
        gate.parse_units(_fatbin((2, 90)) + b"\x01" * 16)


def test_a_kernel_is_judged_in_each_unit_that_has_it() -> None:
    """Two units share a template kernel: one has SASS for the chip, the other has only PTX to offer."""
    elements = [_element("elf", "90", "shared"), _element("ptx", "80", "shared", "alone")]
    library = gate.join("x.so", elements, [[("elf", 90)], [("ptx", 80)]])
    assert [(kernel.name, kernel.sass, kernel.ptx) for kernel in library.kernels] == [
        ("shared", ("90",), ()),
        ("alone", (), ("80",)),
        ("shared", (), ("80",)),
    ]
    assert gate.judge([library], 90).faults == [
        "x.so: alone has only PTX of compute_80",
        "x.so: shared has only PTX of compute_80",
    ]


@pytest.mark.parametrize("units", [[], [[("elf", 90), ("elf", 90)]], [[("elf", 80)]], [[("ptx", 90)]]])
def test_headers_and_tool_must_agree(units: list[list[tuple[gate.Kind, int]]]) -> None:
    with pytest.raises(VerificationError, match="headers"):
        gate.join("x.so", [_element("elf", "90", "k")], units)


def test_ptx_beside_sass_is_no_fault() -> None:
    report = gate.judge([_library(sass=("90",), ptx=("90", "80"))], 90)
    assert report.faults == []
    assert "1 of 1 kernels run natively on SM 90, 1 with PTX beside it" in gate.describe(report.libraries[0], 90)


@pytest.mark.parametrize(
    ("sass", "ptx", "said"),
    [
        ((), ("80",), "libx.so: k has only PTX of compute_80"),
        (("80", "86"), (), "libx.so: k has only sm_80, sm_86"),
        (("90a",), ("90",), "libx.so: k has only sm_90a, PTX of compute_90"),
    ],
)
def test_a_kernel_without_code_for_the_chip_is_named(sass: tuple[str, ...], ptx: tuple[str, ...], said: str) -> None:
    assert gate.judge([_library(sass=("120",)), _library(sass=sass, ptx=ptx)], 120).faults == [said]


def test_a_gate_that_saw_no_kernel_fails() -> None:
    toolkit = Library(path="libcublas.so.13", targets={"90": 7})
    assert gate.judge([toolkit, Library(path="libggml.so")], 90).faults == ["no kernel in any of 2 files"]
    assert gate.describe(toolkit, 90) == "toolkit libcublas.so.13  cubins: sm_90: 7"
    assert gate.describe(Library(path="libggml.so"), 90) == "no GPU code libggml.so"


def test_declared_gaps_pass_and_stale_ones_do_not() -> None:
    libraries = [_library(sass=("90",)), _library("/opt/_vllm_fa2_C.so", ptx=("80",))]
    known = KnownGaps(kernels=(("_vllm_fa2_C*.so", "*"),))
    report = gate.judge(libraries, 90, known)
    assert (report.faults, [gap.is_declared for gap in report.gaps]) == ([], [True])
    stale = KnownGaps(kernels=(("_vllm_fa2_C*.so", "*"), ("libx.so", "k")))
    assert gate.judge(libraries, 90, stale).faults == ["known gap is none any more: libx.so: k"]
    assert len(gate.judge(libraries, 90, KnownGaps(kernels=(("_vllm_fa2_C*.so", "other"),))).faults) == 2


def test_known_gaps_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "gaps.yaml").write_bytes(b"\xff")
    with pytest.raises(MatrixError, match=r"gaps\.yaml cannot be read: unacceptable character"):
        gate.load_known_gaps(tmp_path / "gaps.yaml")


def test_known_gaps_are_looked_for_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gaps.yaml").write_text("native: partial\nsource: x\ngaps: [{library: a, kernels: [k]}]")
    monkeypatch.chdir(tmp_path)
    assert gate.load_known_gaps(Path("gaps.yaml")).kernels == (("a", "k"),)


def test_known_gaps_are_data() -> None:
    text = "native: partial\nsource: wheel 0.33.0\ngaps:\n- {library: a.so, kernels: [k, 'm*']}\n"
    assert gate.parse_known_gaps(yaml.safe_load(text), where="x").kernels == (("a.so", "k"), ("a.so", "m*"))


@pytest.mark.parametrize(
    "text",
    [
        "native: full\nsource: x\ngaps: [{library: a, kernels: [k]}]",
        "native: partial\ngaps: [{library: a, kernels: [k]}]",
        "native: partial\nsource: x\ngaps: []",
        "native: partial\nsource: x\ngaps: [{library: a, kernel: [k]}]",
        "native: partial\nsource: x\nlibraries: [{library: a, kernels: true, native: 0, ptx: 0}]\n"
        "gaps: [{library: a, kernels: [k]}]",
        "",
    ],
)
def test_a_wrong_list_of_gaps_is_refused(text: str) -> None:
    with pytest.raises(MatrixError, match=r"^gaps/x\.yaml: ") as caught:
        gate.parse_known_gaps(yaml.safe_load(text), where="gaps/x.yaml")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "is_toolkit"),
    [
        ("libcublas.so.13", True),
        ("libcublasLt.so", True),
        ("libcudart-a8f2.so.13.0.96", True),
        ("libnccl.so.2", True),
        ("libnvrtc-builtins.so.13.0", True),
        ("libggml-cuda.so", False),
        ("libtorch_cuda.so", True),
        ("_vllm_fa2_C.abi3.so", False),
    ],
)
def test_whose_library_it_is(name: str, is_toolkit: bool) -> None:
    assert bool(gate.TOOLKIT.match(name)) == is_toolkit


def test_the_verb_says_what_a_fake_tool_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, tool = tmp_path / "x.fatbin", tmp_path / "cuobjdump"
    file.write_bytes(_fatbin((2, 120), (1, 80)))
    _write_tool(tool, f"cat <<'END'\n{SYMBOLS}\nEND")
    assert command.main(["gate", str(file), "--sm", "121", "--json", "--cuobjdump", str(tool)]) == 61
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["faults"] == [f"{file}: _Z5scaleIfEvPT_ has only PTX of compute_80"]
    assert [kernel["name"] for kernel in data["libraries"][0]["kernels"]] == [
        "_Z5scaleIfEvPT_",
        "_ZN12_GLOBAL__N_15applyEPfi",
        "sum",
    ]
    assert json.loads(captured.err)["error"].startswith("SM 121 does not run all of it natively")
    gaps = tmp_path / "gaps.yaml"
    gaps.write_text("native: partial\nsource: here\ngaps: [{library: x.fatbin, kernels: ['_Z5scale*']}]\n")
    argv = ["gate", str(file), "--sm", "121", "--cuobjdump", str(tool), "--known-gaps", str(gaps)]
    assert command.main(argv) == 0


def test_a_file_without_kernels_is_not_told_to_be_compiled_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tool = tmp_path / "cpu.so", tmp_path / "cuobjdump"
    file.write_bytes(_elf({".text": b"x" * 64}))
    _write_tool(tool, "echo \"cuobjdump info    : File 'x' does not contain device code\" >&2; exit 255")
    assert command.main(["gate", str(file), "--sm", "90", "--cuobjdump", str(tool)]) == 61
    assert "hint: is it a library with code for a GPU?" in capsys.readouterr().err


def test_a_tool_that_fails_is_quoted(tmp_path: Path) -> None:
    tool = tmp_path / "cuobjdump"
    _write_tool(tool, "echo 'cuobjdump fatal   : Invalid ELF in x' >&2; exit 1")
    (tmp_path / "x.so").write_bytes(_elf({}))
    with pytest.raises(VerificationError, match=r"cuobjdump cannot read .*: cuobjdump fatal   : Invalid ELF"):
        gate.query_library(tool, tmp_path / "x.so")


def test_a_toolkit_that_the_tool_reads_no_more_is_listed_by_its_headers(tmp_path: Path) -> None:
    """cuBLAS 12.4 with cuobjdump 13: it has code for SM 50."""
    tool, file = tmp_path / "cuobjdump", tmp_path / "x.so"
    _write_tool(tool, "echo 'cuobjdump fatal   : Invalid ELF in x' >&2; exit 1")
    whole = _elf({".nv_fatbin": _fatbin((2, 50), (2, 90), (1, 90)) + _fatbin((2, 90)), ".text": b"x" * 64})
    file.write_bytes(whole)
    assert gate.query_library(tool, file, name="libcublas.so.12").targets == {"50": 1, "90": 2}
    with pytest.raises(VerificationError, match="Invalid ELF"):
        gate.query_library(tool, file, name="libggml-cuda.so")
    file.write_bytes(whole[:-300])
    with pytest.raises(VerificationError, match=r"is cut off at|is no shared library"):
        gate.query_library(tool, file, name="libcublas.so.12")


def test_a_file_without_gpu_code_is_no_failure(tmp_path: Path) -> None:
    tool = tmp_path / "cuobjdump"
    _write_tool(tool, "echo \"cuobjdump info    : File 'x' does not contain device code\" >&2; exit 255")
    (tmp_path / "x.so").write_bytes(_elf({".text": b"x" * 64}))
    assert gate.query_library(tool, tmp_path / "x.so", name="x.so") == Library(path="x.so")
    assert gate.query_library(tool, tmp_path / "x.so", name="libcudart.so.13").targets == {}


@pytest.mark.parametrize("name", ["libggml-cuda.so", "libcublas.so.13", "libcudart.so.13.0.96"])
@pytest.mark.parametrize(
    "data", [b"", b"\0" * 4096, b"INPUT(libx.so)\n", b"\x7fELF", b"\x7fELF\x02\x01\x01".ljust(4096, b"\0")]
)
def test_a_library_of_zeros_or_text_is_none(tmp_path: Path, name: str, data: bytes) -> None:
    """cuobjdump finds no device code in them, as in a library for the CPU."""
    tool = tmp_path / "cuobjdump"
    _write_tool(tool, "echo \"cuobjdump info    : File 'x' does not contain device code\" >&2; exit 255")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(VerificationError, match=rf"^opt/llama/{name} is no shared library$"):
        gate.query_library(tool, tmp_path / name, name=f"opt/llama/{name}")


def test_a_library_of_zeros_behind_a_sound_header_is_none(tmp_path: Path) -> None:
    whole = _elf({".text": b"x" * 64})
    file = tmp_path / "libx.so"
    file.write_bytes(whole[: 64 + 56].ljust(len(whole), b"\0"))
    with pytest.raises(VerificationError, match="is no shared library"):
        gate.query_library(tmp_path / "unused", file)


def test_a_missing_tool_is_named(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="cuobjdump is not here") as caught:
        gate.find_tool(tmp_path / "nothing")
    assert "cuda-tools.txt" in str(caught.value.hint)


def _element(kind: gate.Kind, target: str, *kernels: str) -> Element:
    return Element(kind=kind, target=target, kernels=frozenset(kernels))


def _library(path: str = "libx.so", *, sass: tuple[str, ...] = (), ptx: tuple[str, ...] = ()) -> Library:
    return Library(path=path, kernels=(Kernel(name="k", sass=sass, ptx=ptx),))


def _fatbin(*entries: tuple[int, int]) -> bytes:
    """Return a fat binary with an element for each kind and chip, in the layout of nvcc 13.0."""
    body = b""
    for kind, chip in entries:
        header = struct.pack("<HHIQ12x", kind, 0x101, 64, 16) + struct.pack("<I", chip)
        body += header.ljust(64, b"\0") + b"\xff" * 16
    return struct.pack("<IHHQ", gate.FATBIN_MAGIC, 1, 16, len(body)) + body


def _elf(sections: dict[str, bytes], *, dynamic: bytes = b"\1".ljust(16, b"\0")) -> bytes:
    """A 64-bit shared library with these sections and this table for the linker, and nothing else."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    segment = struct.pack("<IIQQQQQQ", 2, 4, 64 + 56, 0, 0, len(dynamic), len(dynamic), 8)
    offset, bodies, rows = 64 + len(segment + dynamic), segment + dynamic, [struct.pack("<IIQQQQ24x", 0, 0, 0, 0, 0, 0)]
    for name, body in [*sections.items(), (".shstrtab", names)]:
        rows.append(struct.pack("<IIQQQQ24x", names.index(name.encode() + b"\0"), 1, 0, 0, offset, len(body)))
        bodies, offset = bodies + body, offset + len(body)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, offset, 0, 64, 56, 1, 64, len(rows), len(rows) - 1
    )
    return header + bodies + b"".join(rows)


def _write_tool(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
