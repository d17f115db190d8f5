from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images import __main__ as command
from images import compat, matrix, select
from images.errors import MatrixError, UsageError
from images.matrix import Matrix, Platform
from images.select import Gpu, Machine

LOADED = matrix.load(Path(__file__).parents[3])
CELLS = {cell.id: cell for cell in LOADED.cells}
NAMES = [name for row in compat.facts().gpus for name in row.names]


def _machine(*names: str, driver: str | None = None, platform: Platform = "linux/amd64") -> Machine:
    return Machine(platform=platform, gpus=tuple(map(select.parse_gpu, names)), driver=driver)


@pytest.mark.parametrize(
    ("names", "driver", "platform", "cell"),
    [
        (("RTX 5090",), "570.124", "linux/amd64", "llama-cu128-sm120"),
        (("RTX 5090",), "580.65.06", "linux/amd64", "llama-cu134-sm120"),
        (("H200",), None, "linux/amd64", "llama-cu134-sm90"),
        (("GH200",), "580.95.05", "linux/arm64", "llama-cu134-sm90"),
        (("T4",), "525.60.13", "linux/amd64", "llama-cu124-sm75"),
        (("T4",), "549", "linux/amd64", "llama-cu124-sm75"),  # 12.8's code is packed in a way that 550 unpacks first
        (("T4",), "550.54.14", "linux/amd64", "llama-cu128-sm75"),
        (("RTX 3060", "RTX 4090"), "580.95.05", "linux/amd64", "llama-cu134-sm86"),
        (("A100", "RTX 4090"), "580.95.05", "linux/amd64", "llama-cu134-sm80"),
        (("B200", "B300"), "580.95.05", "linux/amd64", "llama-cu134-sm100"),
        (("GB10",), "575.57.08", "linux/arm64", "llama-cu129-sm121"),
        (("Jetson AGX Orin",), "580.00", "linux/arm64", "llama-cu134-sm87"),
        ((), None, "linux/amd64", "llama-cpu"),
    ],
)
def test_the_right_cell(names: tuple[str, ...], driver: str | None, platform: Platform, cell: str) -> None:
    choice = select.choose(LOADED, _machine(*names, driver=driver, platform=platform))
    assert choice.cell == cell
    assert choice.tag == f"appliance:{cell}"
    assert {loser.cell for loser in choice.runners_up} == {each for each in CELLS if each.startswith("llama-")} - {cell}
    assert all(loser.why for loser in choice.runners_up)


@pytest.mark.parametrize(
    ("name", "platform", "cell"),
    [
        ("T4", "linux/amd64", "vllm-cu130-sm75"),
        ("H200", "linux/amd64", "vllm-cu130-sm90"),
        ("GB10", "linux/arm64", "vllm-cu130-sm121"),
    ],
)
def test_the_other_engine_is_asked_for_by_name(name: str, platform: Platform, cell: str) -> None:
    choice = select.choose(LOADED, _machine(name, driver="580.95.05", platform=platform), engine="vllm")
    assert choice.cell == cell
    assert all(loser.cell.startswith("vllm-") for loser in choice.runners_up)


def test_an_engine_that_is_not_there_and_one_without_a_cell_are_refused() -> None:
    with pytest.raises(UsageError, match="no such engine: vlm") as caught:
        select.choose(LOADED, _machine("T4"), engine="vlm")
    assert caught.value.hint == "perhaps you meant vllm"
    with pytest.raises(MatrixError, match="no image fits a machine without a GPU"):
        select.choose(LOADED, _machine(), engine="vllm")


def test_runners_up_say_why_they_lost() -> None:
    choice = select.choose(LOADED, _machine("RTX 5090", driver="570.124"))
    why = {loser.cell: loser.why for loser in choice.runners_up}
    assert why["llama-cu130-sm120"] == "needs driver 580, here is 570.124"
    assert why["llama-cu128-sm90"] == "its code for sm_90 does not run on RTX 5090 (SM 120)"
    assert why["llama-cu129-sm121"] == "not for linux/amd64"
    assert why["llama-cpu"] == "would leave the GPU idle"
    why = {loser.cell: loser.why for loser in select.choose(LOADED, _machine("L4", driver="600")).runners_up}
    assert why["llama-cu130-sm89"] == "runs too, with an older CUDA: 13.0"
    assert why["llama-cu134-sm86"] == "runs too, but is compiled for SM 86"


MACHINES = st.builds(
    Machine,
    platform=st.sampled_from(("linux/amd64", "linux/arm64")),
    gpus=st.lists(
        st.sampled_from(sorted(compat.facts().sms)).map(lambda sm: Gpu(name=f"SM {sm}", sm=sm)), max_size=4
    ).map(tuple),
    driver=st.none() | st.tuples(st.integers(500, 640), st.integers(0, 130)).map(lambda two: f"{two[0]}.{two[1]:02}"),
)


@given(machine=MACHINES)
def test_what_is_chosen_runs(machine: Machine) -> None:
    """Never a floor above the driver, never code that a GPU does not run; and a refusal says what would help."""
    chosen, refused = _tried(machine)
    if refused is not None:
        assert "no image fits" in refused.message
        assert refused.hint
        return
    cell = CELLS[chosen]
    assert machine.platform in cell.platforms
    assert (cell.sm_form is None) is (not machine.gpus)
    floors = compat.cell_floors(cell)
    for gpu in machine.gpus:
        assert cell.sm_form is not None
        assert compat.runs_on(cell.sm_form.form, gpu.sm)
        assert floors is not None
        assert machine.driver is None or compat.numbers(machine.driver) >= compat.numbers(floors.sass)


@pytest.mark.parametrize(("engine", "fits"), [("llama", True), ("vllm", False)])
def test_what_leaves_something_to_the_driver_needs_cudas_own(engine: str, *, fits: bool) -> None:
    """580.10 runs the machine code of CUDA 13.0; the PTX of its wheels needs the driver that came with it."""
    machine = _machine("H200", driver="580.10")
    if fits:
        assert select.choose(LOADED, machine, engine=engine).cell == "llama-cu134-sm90"
        return
    with pytest.raises(MatrixError) as caught:
        select.choose(LOADED, machine, engine=engine)
    assert caught.value.hint == "driver 580.65.06 or newer would do, for vllm-cu130-sm90"


@given(machine=MACHINES, engine=st.sampled_from(["llama", "vllm"]))
def test_nothing_is_refused_that_fits(machine: Machine, engine: str) -> None:
    fits = [
        cell
        for cell in LOADED.cells
        if machine.gpus
        and cell.engine.name == engine
        and machine.platform in cell.platforms
        and cell.sm_form
        and all(compat.runs_on(cell.sm_form.form, gpu.sm) for gpu in machine.gpus)
        and (
            machine.driver is None
            or compat.numbers(machine.driver) >= compat.numbers(compat.required_driver(cell) or "0")
        )
    ]
    if fits:
        assert select.choose(LOADED, machine, engine=engine).cell in {cell.id for cell in fits}


@pytest.mark.parametrize(
    ("names", "driver", "said", "hint"),
    [
        (("L4",), "500.1", "the driver is too old: 500.1", "driver 525 or newer would do, for llama-cu124-sm89"),
        (("RTX 5090",), "550.54", "the driver is too old", "driver 570.26 or newer would do, for llama-cu128-sm120"),
        (
            ("RTX 3060", "RTX 4090", "RTX 5090"),
            "580.95.05",
            "no machine code runs on all of them",
            "leave out RTX 5090 (SM 120): llama-cu134-sm86 runs on RTX 3060 (SM 86), RTX 4090 (SM 89)",
        ),
        (("T4", "L4"), "550.1", "on all of them", "leave out L4 (SM 89): llama-cu124-sm75 runs on T4 (SM 75)"),
        (("T4", "L4"), "500.1", "on all of them", "llama-cu134-sm75 runs on T4 (SM 75) with a newer driver"),
        (("V100",), "535.1", "no image fits V100 (SM 70)", "images for linux/amd64 are for SM 75, 80, 86, 89, 90"),
    ],
)
def test_a_refusal_says_what_would_help(names: tuple[str, ...], driver: str, said: str, hint: str) -> None:
    with pytest.raises(MatrixError) as caught:
        select.choose(LOADED, _machine(*names, driver=driver))
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("names", "platform", "hint"),
    [
        (("GB10",), "linux/amd64", "llama-cu134-sm121 does in a machine of linux/arm64: --platform linux/arm64"),
        (("RTX 4090",), "linux/arm64", "llama-cu134-sm89 does in a machine of linux/amd64: --platform linux/amd64"),
        (("V100",), "linux/arm64", "images for linux/arm64 are for SM 87, 90, 100, 103, 110, 121"),
        ((), "linux/arm64", "images for linux/arm64 need a GPU of SM 87, 90, 100, 103, 110, 121"),
    ],
)
def test_a_gpu_of_another_kind_of_machine_is_said(names: tuple[str, ...], platform: Platform, hint: str) -> None:
    with pytest.raises(MatrixError) as caught:
        select.choose(LOADED, _machine(*names, driver="620", platform=platform))
    assert caught.value.hint == hint


def test_a_thor_runs_vllm_with_the_driver_that_it_has() -> None:
    """580.00 is what its own Linux calls it; a card's driver of that branch begins at 580.65.06."""
    choice = select.choose(LOADED, _machine("NVIDIA Thor", driver="580.00", platform="linux/arm64"), engine="vllm")
    assert choice.cell == "vllm-cu130-sm110"
    with pytest.raises(MatrixError, match=r"the driver is too old: 580\.00"):
        select.choose(LOADED, _machine("H100", driver="580.00"), engine="vllm")


def test_a_cell_that_cannot_be_built_yet_comes_last() -> None:
    best = CELLS["llama-cu134-sm90"]
    open_cell = replace(best, base=replace(best.base, digest=None, status="unresolved"))
    changed = _with(open_cell)
    choice = select.choose(changed, _machine("H100", driver="600"))
    assert choice.cell == "llama-cu130-sm90"
    why = {loser.cell: loser.why for loser in choice.runners_up}
    assert why[best.id] == "cannot be built yet: no digest for debian:bookworm-slim"


@pytest.mark.parametrize(
    ("name", "sm"),
    [
        ("RTX 5090", "120"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "89"),
        ("NVIDIA H100 80GB HBM3", "90"),
        ("NVIDIA A100-SXM4-80GB", "80"),
        ("Tesla T4", "75"),
        ("nvidia rtx 6000 ada generation", "89"),
        ("Quadro RTX 6000", "75"),
        ("RTX PRO 6000", "120"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "120"),
        ("NVIDIA A2", "86"),
        ("NVIDIA A10G", "86"),
        ("NVIDIA GeForce GTX 1660 SUPER", "75"),
        ("Quadro T2000 with Max-Q Design", "75"),
        ("Orin (nvgpu)", "87"),
        ("NVIDIA Thor", "110"),
        ("Jetson AGX Thor", "110"),
        ("DGX Spark", "121"),
        ("NVIDIA RTX A2000 12GB", "86"),
    ],
)
def test_gpus_by_the_names_that_people_and_drivers_use(name: str, sm: str) -> None:
    assert select.parse_gpu(name).sm == sm


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_name_finds_itself(name: str) -> None:
    sm = {name: row.sm for row in compat.facts().gpus for name in row.names}[name]
    assert select.parse_gpu(name).sm == sm
    assert select.parse_gpu(f"NVIDIA {name.upper()}").sm == sm


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("RTX 4000", "several GPUs are called that", "RTX 4000 Ada (SM 89), RTX 4000 SFF Ada (SM 89), Quadro RTX 4000"),
        ("RTX 509", "no GPU of images/facts/nvidia.yaml", "perhaps you meant GeForce RTX 5090"),
        ("Radeon", "is called that: Radeon", "give its SM, which nvidia-smi --query-gpu=compute_cap"),
        ("GTX 1080", "is called that: GTX 1080", "GeForce RTX 3080; else give its SM"),
        ("", "is called that", "give its SM"),
    ],
)
def test_a_name_that_is_not_one_gpu_is_refused(name: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        select.parse_gpu(name)
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


@given(name=st.text())
def test_any_text_is_a_gpu_or_refused_in_words(name: str) -> None:
    with contextlib.suppress(UsageError):
        assert select.parse_gpu(name).sm in compat.facts().sms


@pytest.mark.parametrize("text", ["", "580.", "R580", "580..1", "latest"])
def test_a_driver_is_a_version(text: str) -> None:
    with pytest.raises(UsageError, match="not a driver version"):
        select.parse_driver(text)


def test_an_sm_may_have_a_point() -> None:
    assert select.parse_sm("12.0").sm == "120"
    with pytest.raises(UsageError) as caught:
        select.parse_sm("1200")
    assert caught.value.hint == "perhaps you meant 120"


def test_what_nvidia_smi_says() -> None:
    lines = ["NVIDIA H200, 580.95.05, 9.0", "NVIDIA H200, 580.95.05, 9.0"]
    machine = select.parse_smi(0, lines, "linux/amd64")
    assert machine == Machine(
        platform="linux/amd64", gpus=(Gpu(name="NVIDIA H200", sm="90"),) * 2, driver="580.95.05"
    )  # fmt: skip
    by_name = select.parse_smi(0, ["Tesla T4, 450.1, [N/A]"], "linux/amd64")
    assert by_name.gpus == (Gpu(name="Tesla T4", sm="75"),)


@pytest.mark.parametrize(
    ("code", "lines"), [(127, ["nvidia-smi: No such file or directory"]), (6, ["No devices were found"])]
)
def test_no_gpu_means_the_cpu(code: int, lines: list[str]) -> None:
    machine = select.parse_smi(code, lines, "linux/amd64")
    assert select.choose(LOADED, machine).cell == "llama-cpu"


@pytest.mark.parametrize(
    ("code", "lines"),
    [(9, ["NVIDIA-SMI has failed because it couldn't communicate"]), (0, []), (0, ["Unable to determine the handle"])],
)
def test_a_failing_nvidia_smi_is_said_and_not_taken_for_no_gpu(code: int, lines: list[str]) -> None:
    with pytest.raises(MatrixError) as caught:
        select.parse_smi(code, lines, "linux/amd64")
    assert f"nvidia-smi failed with exit {code}: {' '.join(lines) or 'it said nothing'}" == caught.value.message
    assert "--driver" in (caught.value.hint or "")


def test_the_command_prints_the_tag_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["select", "--driver", "570.124", "--gpu", "RTX 5090", "--platform", "linux/amd64"]) == 0
    out, err = capsys.readouterr()
    assert out == "appliance:llama-cu128-sm120\n"
    assert err.startswith("appliance:llama-cu128-sm120: its code for sm_120a runs on RTX 5090 (SM 120); driver 570.124")
    assert "llama-cu134-sm120    needs driver 580" in err


def test_the_command_prints_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["select", "--sm", "90", "--platform", "linux/arm64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tag"] == "appliance:llama-cu134-sm90"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--driver", "580"], 2),
        (["--gpu", "RTX 509"], 2),
        (["--driver", "x", "--sm", "90"], 2),
        (["--driver", "500", "--sm", "90", "--platform", "linux/amd64"], 10),
    ],
)
def test_the_command_says_what_it_cannot(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["select", *argv]) == code
    assert "hint: " in capsys.readouterr().err


def _tried(machine: Machine) -> tuple[str, None] | tuple[None, MatrixError]:
    try:
        return select.choose(LOADED, machine).cell, None
    except MatrixError as error:
        return None, error


def _with(changed: matrix.Cell) -> Matrix:
    return replace(LOADED, cells=tuple(changed if cell.id == changed.id else cell for cell in LOADED.cells))
