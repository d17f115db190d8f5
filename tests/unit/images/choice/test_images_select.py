from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images import __main__ as command
from images.choice import cards, gpus, select
from images.choice.gpus import Gpu
from images.choice.proofs import Proof, Proofs, Record
from images.choice.select import Machine
from images.errors import MatrixError, UsageError
from images.matrix import compat, matrix
from images.matrix.matrix import Matrix, Platform
from images.verbs.checkout import platform_here

LOADED = matrix.load(Path(__file__).parents[4])
CELLS = {cell.id: cell for cell in LOADED.cells}
NAMES = [name for row in compat.facts().gpus for name in row.names]


def _machine(*names: str, driver: str | None = None, platform: Platform = "linux/amd64") -> Machine:
    return Machine(platform=platform, gpus=tuple(map(gpus.parse_gpu, names)), driver=driver)


PROVEN = Proof(
    cell="llama-cu130-sm90",
    platform="linux/amd64",
    commit="fd84750",
    digest=None,
    date=date(2026, 11, 21),
    machine=None,
    size_mib=852,
    ran=("verify",),
    digest_reproducible=None,
)
PROOFS: Proofs = {(PROVEN.cell, PROVEN.platform): PROVEN}
AMD, ARM = get_args(Platform)


# The table of `select` in a review, row by row: what it found right, and what it should have been.
@pytest.mark.parametrize(
    ("names", "driver", "platform", "cell"),
    [
        (("RTX 2060",), "535.183.06", AMD, "llama-cu124-sm75"),
        (("GTX 1650",), "535.183.06", AMD, "llama-cu124-sm75"),
        (("Quadro RTX 6000",), "535.183.06", AMD, "llama-cu124-sm75"),
        (("RTX 2070 S",), "525.60.13", AMD, "llama-cu124-sm75"),
        (("RTX 4080",), "525.60.13", AMD, "llama-cu124-sm89"),
        (("A40",), "525.147.05", AMD, "llama-cu124-sm86"),
        (("T4",), "549", AMD, "llama-cu124-sm75"),
        (("RTX 2080",), "550.54.15", AMD, "llama-cu124-sm75"),  # 12.4 is the driver's own; 12.8 would run too
        (("T1000 8GB",), "550.54.15", AMD, "llama-cu124-sm75"),
        (("GTX 1660 S",), "560.35.03", AMD, "llama-cu124-sm75"),
        (("RTX 2080 Ti", "RTX 2080 Ti"), "580.65.06", AMD, "llama-cu130-sm75"),
        (("A30",), "535.183.06", AMD, "llama-cu124-sm80"),
        (("RTX 3050 Laptop GPU",), "550.54.15", AMD, "llama-cu124-sm86"),
        (("RTX 3070",), "570.124.06", AMD, "llama-cu128-sm86"),
        (("RTX 3090 Ti",), "590.48.01", AMD, "llama-cu130-sm86"),
        (("RTX 4060",), "537.58", AMD, "llama-cu124-sm89"),
        (("RTX 4090",), "550.40.07", AMD, "llama-cu124-sm89"),
        (("RTX 4090",), "550.54.14", AMD, "llama-cu124-sm89"),
        (("RTX 4090",), "550", AMD, "llama-cu124-sm89"),
        (("RTX 4070 Ti SUPER",), "572.44", AMD, "llama-cu128-sm89"),
        (("L40S",), "581.29", AMD, "llama-cu130-sm89"),
        (("RTX 5090",), "570.26", AMD, "llama-cu128-sm120"),
        (("RTX PRO 6000 Blackwell Server Edition",), "575.57.08", AMD, "llama-cu128-sm120"),
        (("RTX 5080",), "595.58.03", AMD, "llama-cu130-sm120"),
        (("RTX 5090",), "615.71.09", AMD, "llama-cu134-sm120"),
        (("H100",), "535.183.06", AMD, "llama-cu124-sm90"),
        (("H200",), "570.124.06", AMD, "llama-cu128-sm90"),
        (("GH200",), "550.54.15", ARM, "llama-cu128-sm90"),
        (("H200 NVL",), "580.65.06", AMD, "llama-cu130-sm90"),
        (("H200",), "615.71.09", AMD, "llama-cu130-sm90"),  # proven before newest
        (("GH200",), "615.71.09", ARM, "llama-cu134-sm90"),  # proven on another platform is not proven
        (("B200",), "570.124.06", AMD, "llama-cu128-sm100"),
        (("GB200",), "580.95.05", ARM, "llama-cu130-sm100"),
        (("B300",), "575.51.03", AMD, "llama-cu129-sm103"),
        (("B300",), "580.65.06", AMD, "llama-cu130-sm103"),
        (("B200", "B300"), "580.65.06", AMD, "llama-cu130-sm100"),
        (("RTX 3060", "RTX 3090", "A100"), "580.65.06", AMD, "llama-cu130-sm80"),
        (("RTX 3090", "RTX 4090"), "580.65.06", AMD, "llama-cu130-sm86"),
        (("RTX 3090", "RTX 5090"), "580.65.06", AMD, "llama-cu130-sm86-sm120"),
        (("RTX 4090", "RTX 5090"), "580.65.06", AMD, "llama-cu130-sm86-sm120"),
        (("A800",), "535.183.06", AMD, "llama-cu124-sm80"),
        (("H20",), "580.65.06", AMD, "llama-cu130-sm90"),
        (("L20",), "550.54.15", AMD, "llama-cu124-sm89"),
        (("Thor",), "580.00", ARM, "llama-cu130-sm110"),
        (("GB10",), "575.51.03", ARM, "llama-cu129-sm121"),
        (("GB10",), "580.95.05", ARM, "llama-cu130-sm121"),
        ((), None, AMD, "llama-cpu"),
    ],
)
def test_the_right_cell(names: tuple[str, ...], driver: str | None, platform: Platform, cell: str) -> None:
    choice = select.choose(LOADED, _machine(*names, driver=driver, platform=platform), record=Record(proofs=PROOFS))
    assert choice.cell == cell
    assert choice.tag == f"appliance:{cell}"
    assert choice.command == f"python3 -m images build --only {cell} --base auto"
    assert choice.left_out == ()
    assert {loser.cell for loser in choice.runners_up} == {each for each in CELLS if each.startswith("llama-")} - {cell}
    assert all(loser.why for loser in choice.runners_up)


@pytest.mark.parametrize(
    ("names", "driver", "cell", "left", "why"),
    [
        (("RTX 3090", "RTX 5090"), "570.124", "llama-cu128-sm120", "RTX 3090 (SM 86)", "sm_120a does not run on it"),
        (
            ("RTX 3090", "RTX 5090"),
            "550.54.15",
            "llama-cu124-sm86",
            "RTX 5090 (SM 120)",
            "needs driver 570.26, here is 550.54.15",
        ),
        (("RTX 2080 Ti", "RTX 3090"), "580.65.06", "llama-cu130-sm86", "RTX 2080 Ti (SM 75)", "sm_86 does not run"),
        (("A100", "H100"), "580.65.06", "llama-cu130-sm90", "A100 (SM 80)", "sm_90 does not run on it"),
        (("A100 80GB", "A100 80GB", "H100"), "580.65.06", "llama-cu130-sm80", "H100 (SM 90)", "sm_80 does not run"),
        (("P40", "RTX 3090"), "550.54.15", "llama-cu124-sm86", "P40 (SM 61)", "Pascal, and the matrix begins at SM 75"),
        (
            ("B300", "RTX 3090"),
            "570.124.06",
            "llama-cu128-sm86",
            "B300 (SM 103)",
            "needs driver 575.51.03, here is 570",
        ),
        (("V100", "RTX 3090"), "580.65.06", "llama-cu130-sm86", "V100 (SM 70)", "CUDA 12 can make code for SM 70"),
        (("GT 710", "RTX 3090"), "580.65.06", "llama-cu130-sm86", "GT 710 (SM 35)", "it is of Kepler"),
        (("B200", "B300"), "570.124.06", "llama-cu128-sm100", "B300 (SM 103)", "needs driver 575.51.03, here is 570"),
    ],
)
def test_the_cell_that_serves_most_is_taken_and_the_rest_left_out(
    names: tuple[str, ...], driver: str, cell: str, left: str, why: str
) -> None:
    choice = select.choose(LOADED, _machine(*names, driver=driver), record=Record(proofs=PROOFS))
    assert choice.cell == cell
    (out,) = choice.left_out
    assert out.gpu == left
    assert why in out.why


def test_memory_counts_where_bandwidth_is_not_known() -> None:
    """An unlisted card of 48 GB beside an H20, whose bandwidth no fact says."""
    unlisted = Gpu(name="NVIDIA X", sm="86", memory_gib=48.0)
    h20 = Gpu(name="NVIDIA H20", sm="90", memory_gib=95.6)
    for pair in ((unlisted, h20), (h20, unlisted)):
        choice = select.choose(LOADED, Machine(platform=AMD, gpus=pair, driver="580.65.06"))
        assert choice.cell == "llama-cu130-sm90"
        assert [each.gpu for each in choice.left_out] == ["NVIDIA X (SM 86)"]


@pytest.mark.parametrize(
    "names",
    [
        ("B200", "RTX 3090"),
        ("H20", "RTX 3090"),
        ("GH200 480GB", "RTX 4090"),
        ("B100", "RTX 3090"),  # no figures at all
        ("RTX PRO 3000 Blackwell Generation Laptop GPU", "RTX 2080"),
    ],
)
def test_a_card_without_figures_is_not_the_weak_one(names: tuple[str, str]) -> None:
    for order in (names, names[::-1]):
        choice = select.choose(LOADED, _machine(*order, driver="580.65.06"))
        assert [each.gpu for each in choice.left_out] == [str(gpus.parse_gpu(names[1]))]
        is_guess = gpus.parse_gpu(names[0]).memory_gib is None
        assert ("is not known, so the newest chip decides" in choice.why) is is_guess


def test_nothing_is_said_of_memory_that_decides_nothing() -> None:
    assert "not known" not in select.choose(LOADED, _machine("B100", "B100", driver="580.65.06")).why
    for old in ("P40", "V100"):
        assert "not known" not in select.choose(LOADED, _machine("B100", old, driver="580.65.06")).why


@pytest.mark.parametrize(
    ("name", "sm", "memory_gib"),
    [
        ("RTX PRO 500", "120", None),
        ("RTX PRO 500 Blackwell", "120", None),
        ("GeForceRTX3060", "86", 8),
        ("NVIDIAGeForceRTX3060Ti", "86", 8),
        ("QuadroRTX6000", "75", 24),
        ("GRID RTX6000-4Q", "75", 4),
        ("GRID A100-10C", "80", 10),
        ("NVIDIA A40-8Q", "86", 8),
        ("NVIDIA RTX6000-Ada-16Q", "89", 16),
    ],
)
def test_names_run_together_shares_and_names_of_the_driver_alone(name: str, sm: str, memory_gib: float | None) -> None:
    gpu = gpus.parse_gpu(name)
    assert (gpu.name, gpu.sm, gpu.memory_gib) == (name, sm, memory_gib)


def test_a_share_of_one_of_several_gpus_is_refused_with_these() -> None:
    with pytest.raises(UsageError, match="several GPUs are called that: RTX6000"):
        gpus.parse_gpu("RTX6000-4Q")


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("NVIDIA H100 80GB HBM3", (80, 3350)),
        ("Tesla A100", (40, 1555)),
        ("A100", (40, 1555)),
        ("NVIDIA B200", (180, 8000)),
        ("NVIDIA H20", (96, 4000)),
        ("T1200", (4, 160)),
        ("NVIDIA A800 40GB Active", (40, 1560)),
    ],
)
def test_figures_of_names_that_one_data_set_lacks(name: str, figures: tuple[float, float]) -> None:
    gpu = gpus.parse_gpu(name)
    assert (gpu.memory_gib, gpu.bandwidth_gb_s) == figures


def test_it_says_what_was_proven() -> None:
    assert select.choose(LOADED, _machine("H100", driver="580.65.06"), record=Record(proofs=PROOFS)).proof == str(
        PROVEN
    )
    assert (
        select.choose(LOADED, _machine("L4", driver="580.65.06"), record=Record(proofs=PROOFS)).proof
        == "rendered, never built"
    )


@pytest.mark.parametrize(("name", "platform"), [("T4", AMD), ("H200", AMD), ("GB10", ARM), ("Thor", ARM)])
def test_the_other_engine_is_asked_for_by_name(name: str, platform: Platform) -> None:
    choice = select.choose(LOADED, _machine(name, driver="580.95.05", platform=platform), engine="vllm")
    assert choice.cell == "vllm-cu130"
    why = "would leave the GPU idle" if platform == AMD else f"not for {ARM}"
    assert [(each.cell, each.why) for each in choice.runners_up] == [("vllm-cpu", why)]


def test_without_a_gpu_the_other_engine_has_an_image_of_its_own() -> None:
    choice = select.choose(LOADED, _machine(platform=AMD), engine="vllm")
    assert (choice.cell, choice.why) == ("vllm-cpu", "no GPU was found; it runs on the CPU")
    assert choice.runners_up[0].why == "needs a GPU"


def test_a_wheel_serves_a_chip_where_it_was_looked_at_alone() -> None:
    """Code for Ada is in both wheels, and cards in Arm servers are out of scope."""
    with pytest.raises(MatrixError, match="cards in Arm servers: no image is built for them"):
        select.choose(LOADED, _machine("L4", driver="580.95.05", platform=ARM), engine="vllm")


def test_an_engine_that_is_not_there_and_one_without_a_cell_are_refused() -> None:
    with pytest.raises(UsageError, match="no such engine: vlm") as caught:
        select.choose(LOADED, _machine("T4"), engine="vlm")
    assert caught.value.hint == "perhaps you meant vllm"
    with pytest.raises(MatrixError, match="no image fits a machine without a GPU on linux/arm64"):
        select.choose(LOADED, _machine(platform=ARM), engine="vllm")


def test_runners_up_say_why_they_lost() -> None:
    choice = select.choose(LOADED, _machine("RTX 5090", driver="570.124"))
    why = {loser.cell: loser.why for loser in choice.runners_up}
    assert why["llama-cu130-sm120"] == "needs driver 580, here is 570.124"
    assert why["llama-cu128-sm90"] == "its code for sm_90 does not run on RTX 5090 (SM 120)"
    assert why["llama-cu129-sm121"] == "not for linux/amd64"
    assert why["llama-cpu"] == "would leave the GPU idle"
    why = {loser.cell: loser.why for loser in select.choose(LOADED, _machine("L4", driver="600")).runners_up}
    assert why["llama-cu128-sm89"] == "runs too, with an older CUDA: 12.8"
    assert why["llama-cu134-sm89"] == "runs too, with a CUDA newer than the driver's own: 13.4"
    assert why["llama-cu130-sm86"] == "runs too, but is compiled for SM 86"
    assert why["llama-cu130-sm86-sm120"] == "runs too, but is compiled for SM 86, 120"
    why = {
        each.cell: each.why for each in select.choose(LOADED, _machine("H100"), record=Record(proofs=PROOFS)).runners_up
    }
    assert why["llama-cu134-sm90"] == "runs too, and was never proven"
    mixed = select.choose(LOADED, _machine("RTX 3090", "RTX 5090", driver="580.65.06")).runners_up
    why = {loser.cell: loser.why for loser in mixed}
    assert why["llama-cu130-sm120"] == "does not serve RTX 3090 (SM 86): its code for sm_120a does not run on it"


def test_a_build_with_a_substitute_toolkit_counts_as_rendered() -> None:
    """It is another compiler's code, and no reason to pass the driver's own CUDA over."""
    row = PROVEN.model_copy(update={"cell": "llama-cu128-sm90", "toolkit": "Debian's nvcc sha256:0"})
    record = Record(proofs={(row.cell, row.platform): row})
    choice = select.choose(LOADED, _machine("H100", driver="580.65.06"), record=record)
    assert choice.cell == "llama-cu130-sm90"
    assert "never proven" not in " ".join(loser.why for loser in choice.runners_up)
    choice = select.choose(LOADED, _machine("H100", driver="570.124.06"), record=record)
    assert (choice.cell, choice.state) == ("llama-cu128-sm90", "substitute toolkit")
    page = cards.page(LOADED, record)
    assert "`llama-cu128-sm90` | no, built with a substitute toolkit | 852 MiB |" in page


def test_the_page_of_cards_says_what_an_image_takes_and_what_is_not_known() -> None:
    rows = [
        PROVEN.model_copy(update={"cell": "llama-cu130-sm90", "compressed_bytes": 407_600_000}),
        PROVEN.model_copy(update={"cell": "llama-cpu", "size_mib": 281, "compressed_bytes": 99_500_000}),
    ]
    page = cards.page(LOADED, Record(proofs={(row.cell, row.platform): row for row in rows}))
    assert "`llama-cu130-sm90` | yes | 852 MiB, 408 MB to download |" in page
    assert "image is `llama-cpu` (281 MiB, 100 MB to download)." in page
    assert "`llama-cu130-sm80` | no |  |" in page


def test_a_proven_cell_of_two_chips_takes_no_machine_of_one() -> None:
    proofs = {(cell, "linux/amd64"): PROVEN for cell in ("llama-cu130-sm86-sm120", "llama-cu130-sm80")}
    for name, cell in (("RTX 5090", "llama-cu130-sm120"), ("RTX 3090", "llama-cu130-sm86"), ("L4", "llama-cu130-sm89")):
        assert select.choose(LOADED, _machine(name, driver="580.65.06"), record=Record(proofs=proofs)).cell == cell
    cards = _machine("RTX 3090", "RTX 5090", driver="580.65.06")
    assert select.choose(LOADED, cards, record=Record(proofs=proofs)).cell == "llama-cu130-sm86-sm120"


MACHINES = st.builds(
    Machine,
    platform=st.sampled_from(("linux/amd64", "linux/arm64")),
    gpus=st.lists(
        st.sampled_from(sorted(compat.facts().sms)).map(lambda sm: Gpu(name=f"SM {sm}", sm=sm)), max_size=4
    ).map(tuple),
    driver=st.none() | st.tuples(st.integers(500, 640), st.integers(0, 130)).map(lambda two: f"{two[0]}.{two[1]:02}"),
)


@given(machine=MACHINES, proven=st.sets(st.sampled_from(sorted(CELLS))))
def test_a_proof_chooses_between_toolkits_of_one_chip(machine: Machine, proven: set[str]) -> None:
    """A proof does not move a GPU to another chip's code or to an image of two chips."""
    plain, refused = _tried(machine)
    if plain is None:
        assert refused
        return
    proofs: Proofs = {(cell, machine.platform): PROVEN for cell in proven}
    chosen = select.choose(LOADED, machine, record=Record(proofs=proofs))
    assert CELLS[chosen.cell].sms == CELLS[plain.cell].sms
    assert chosen.left_out == plain.left_out
    if plain.cell in proven:
        assert chosen.cell in proven


@given(machine=MACHINES)
def test_what_is_chosen_runs(machine: Machine) -> None:
    """Never a driver older than the GPU's own first one, never code that it does not run; all others are left out."""
    chosen, refused = _tried(machine)
    if refused is not None:
        assert "no image fits" in refused.message
        assert refused.hint
        return
    assert chosen
    cell = CELLS[chosen.cell]
    known = compat.facts()
    assert machine.platform in cell.platforms
    assert (cell.sm_forms == ()) is (not machine.gpus)
    left = {each.gpu for each in chosen.left_out}
    assert len(left) < len({str(gpu) for gpu in machine.gpus}) or not machine.gpus
    assert all(each.why for each in chosen.left_out)
    for gpu in (gpu for gpu in machine.gpus if str(gpu) not in left):
        assert any(compat.runs_on(form, gpu.sm) for form in cell.forms)
        floors = compat.cell_floors(cell, sm=gpu.sm)
        assert floors is not None
        first = known.sms[gpu.sm].first_driver or "0"
        assert machine.driver is None or _at_least(machine.driver, floors.sass)
        assert machine.driver is None or _at_least(machine.driver, first)


@given(machine=MACHINES, engine=st.sampled_from(["llama", "vllm"]))
def test_nothing_is_refused_that_fits(machine: Machine, engine: str) -> None:
    fits = {
        cell.id
        for cell in LOADED.cells
        for gpu in machine.gpus
        if cell.engine.name == engine
        and machine.platform in cell.platforms
        and any(compat.runs_on(form.form, gpu.sm) for form in cell.serving(gpu.sm, machine.platform))
        and (machine.driver is None or _at_least(machine.driver, compat.required_driver(cell, sm=gpu.sm) or "0"))
    }
    if fits:
        assert select.choose(LOADED, machine, engine=engine).cell in fits


@pytest.mark.parametrize(("engine", "fits"), [("llama", True), ("vllm", False)])
def test_what_leaves_something_to_the_driver_needs_cudas_own(engine: str, *, fits: bool) -> None:
    """580.10 runs the machine code of CUDA 13.0; the PTX of its wheels needs the driver that came with it."""
    machine = _machine("L4", driver="580.10")
    if fits:
        assert select.choose(LOADED, machine, engine=engine).cell == "llama-cu128-sm89"
        return
    with pytest.raises(MatrixError) as caught:
        select.choose(LOADED, machine, engine=engine)
    assert caught.value.hint == "driver 580.65.06 or newer would do, for vllm-cu130"


@pytest.mark.parametrize(
    ("names", "driver", "platform", "said", "hint"),
    [
        (("L4",), "500.1", AMD, "driver is too old: 500.1", "driver 525 or newer would do, for llama-cu124-sm89"),
        (("RTX 2060 SUPER",), "470.256.02", AMD, "too old", "driver 525 or newer would do, for llama-cu124-sm75"),
        (("RTX 5090",), "565.57.01", AMD, "too old", "driver 570.26 or newer would do, for llama-cu128-sm120"),
        (("B300",), "570.124.06", AMD, "too old", "driver 575.51.03 or newer would do, for llama-cu129-sm103"),
        (("GH200 480GB",), "535.183.06", ARM, "too old", "driver 550.54.14 or newer would do, for llama-cu128-sm90"),
        (("Thor",), "570", ARM, "too old", "a JetPack whose driver is 580 or newer would do, for llama-cu130-sm110"),
        (("V100",), "535.1", AMD, "the matrix begins at SM 75; CUDA 12 can make code for SM 70", "for SM 75, 80, 86"),
        (("TITAN V",), "580", AMD, "the matrix begins at SM 75", "appliance:llama-cpu runs on the CPU alone"),
        (("Tesla P40",), "535.1", AMD, "Tesla P40 (SM 61): it is of Pascal", "images for linux/amd64 are for SM 75"),
        (("GTX 1080 Ti",), None, AMD, "it is of Pascal, and the matrix begins at SM 75", "SM 75, 80"),
        (("K80", "M40"), "470", AMD, "K80 (SM 37): it is of Kepler", "llama-cpu runs on the CPU"),
        (("Orin (nvgpu)",), "540.4.0", ARM, "no code for SM 87", "images for linux/arm64 are for SM 90, 100, 103, 110"),
        (("Jetson Orin Nano",), "580.00", ARM, "no code for SM 87", "images for linux/arm64 are for SM 90, 100, 103"),
        (("Jetson Xavier NX",), None, ARM, "Volta (Jetson Xavier)", "images for linux/arm64 are for SM 90"),
        (("A100",), "580.95.05", ARM, "cards in Arm servers: no image is built for them", "runs on the CPU alone"),
        (("GB10",), "620", AMD, "no image fits GB10 (SM 121) on linux/amd64", "does in a machine of linux/arm64"),
    ],
)
def test_a_refusal_gives_the_reason_and_what_would_help(
    names: tuple[str, ...], driver: str | None, platform: Platform, said: str, hint: str
) -> None:
    with pytest.raises(MatrixError) as caught:
        select.choose(LOADED, _machine(*names, driver=driver, platform=platform))
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_thor_runs_vllm_with_the_driver_that_it_has() -> None:
    """580.00 is what its own Linux calls it; a card's driver of that branch begins at 580.65.06."""
    choice = select.choose(LOADED, _machine("NVIDIA Thor", driver="580.00", platform="linux/arm64"), engine="vllm")
    assert choice.cell == "vllm-cu130"
    with pytest.raises(MatrixError, match=r"the driver is too old: 580\.00"):
        select.choose(LOADED, _machine("H100", driver="580.00"), engine="vllm")


def test_a_cell_that_cannot_be_built_yet_comes_last() -> None:
    best = CELLS["llama-cu130-sm90"]
    open_cell = replace(best, base=replace(best.base, digest=None, status="unresolved"))
    changed = _with(open_cell)
    choice = select.choose(changed, _machine("H100", driver="600"))
    assert choice.cell == "llama-cu128-sm90"
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
        *(("A800", "80"), ("CMP 170HX", "80"), ("H800", "90"), ("H20", "90"), ("L20", "89"), ("L40G", "89")),
        *(("B100", "100"), ("RTX A4500", "86"), ("RTX A5500", "86"), ("RTX 5880 Ada", "89"), ("RTX 1000 Ada", "89")),
        *(("NVIDIA RTX 1000 Ada Generation Laptop GPU", "89"), ("RTX PRO 3000", "120"), ("Quadro T1000", "75")),
        *(("CMP 40HX", "75"), ("rtx4090", "89"), ("2080ti", "75"), ("rtx3080ti", "86"), ("GTX1650", "75")),
        *(("Tesla P40", "61"), ("GT 710", "35"), ("Jetson Xavier NX", "72"), ("Tesla V100-SXM2-16GB", "70")),
    ],
)
def test_gpus_by_the_names_that_people_and_drivers_use(name: str, sm: str) -> None:
    assert gpus.parse_gpu(name).sm == sm


@pytest.mark.parametrize(
    ("name", "sm"),
    [
        *(("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "80"), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "90")),
        *(("GRID T4-16Q", "75"), ("GRID A100X-40C", "80"), ("NVIDIA A40-48Q", "86"), ("NVIDIA L40S-24C", "89")),
        *(("NVIDIA RTX6000-Ada-48Q", "89"), ("NVIDIA A800 40GB Active", "80"), ("NVIDIA HGX GB200", "100")),
        *(("NVIDIA GeForce RTX 3050 A Laptop GPU", "89"), ("NVIDIA GeForce RTX 3050 Laptop GPU", "86")),
        *(("NVIDIA RTX PRO 500 Blackwell Generation Laptop GPU", "120"), ("NVIDIA L2", "89"), ("4060ti 16g", "89")),
        *(("Quadro T1000 with Max-Q Design", "75"), ("NVIDIA PG506-232", "80"), ("Matrox D-Series D2450", "75")),
        *(("NVIDIA Jetson Orin Nano Developer Kit Super", "87"), ("Jetson AGX Orin Developer Kit", "87")),
        *(("IGX Orin", "87"), ("DRIVE AGX Orin", "87"), ("IGX Thor", "110"), ("Jetson AGX Thor Developer Kit", "110")),
        *(("Tegra Xavier", "72"), ("Jetson Xavier NX Developer Kit", "72"), ("Jetson TX2", "62")),
    ],
)
def test_variants_of_laptops_servers_shares_and_boards(name: str, sm: str) -> None:
    assert gpus.parse_gpu(name).sm == sm


@pytest.mark.parametrize(("plain", "sm"), sorted(gpus.driver_names().items()))
def test_what_the_driver_calls_a_gpu_is_of_its_chip(plain: str, sm: str) -> None:
    """Other files that list the same name give the same chip."""
    assert gpus.parse_gpu(f"NVIDIA {plain}").sm == sm
    known = {compat.plain_name(name): row.sm for row in compat.facts().gpus for name in row.names}
    known |= {key: gpu.sm for key, gpu in gpus.products().items()}
    assert known.get(plain, sm) == sm


def test_a_share_of_a_gpu_has_its_own_memory() -> None:
    whole, share = gpus.parse_gpu("A100-SXM4-40GB"), gpus.parse_gpu("NVIDIA A100-SXM4-40GB MIG 3g.20gb")
    assert (whole.memory_gib, share.memory_gib, share.bandwidth_gb_s) == (40, 20, 780)
    assert gpus.parse_gpu("B200 MIG 1g.23gb").memory_gib == 23


def test_a_laptop_has_less_than_the_card_of_its_name() -> None:
    assert gpus.parse_gpu("RTX 4090").memory_gib == 24
    assert gpus.parse_gpu("NVIDIA GeForce RTX 4090 Laptop GPU").memory_gib == 16
    assert gpus.parse_gpu("rtx 5090 laptop").memory_gib == 24
    assert gpus.parse_gpu("RTX 3060").memory_gib == 8  # of several boards the least


def test_the_two_files_of_names_agree() -> None:
    listed = {compat.plain_name(name): row.sm for row in compat.facts().gpus for name in row.names}
    products = gpus.products()
    assert len(products) > 500
    for key in listed.keys() & products.keys():
        assert products[key].sm == listed[key]
    known = compat.facts()
    assert {gpu.sm for gpu in products.values()} <= known.sms.keys() | known.older.keys()
    assert all(gpu.worth is not None for gpu in products.values() if int(gpu.sm) >= 75)


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_name_finds_itself(name: str) -> None:
    sm = {name: row.sm for row in compat.facts().gpus for name in row.names}[name]
    assert gpus.parse_gpu(name).sm == sm
    assert gpus.parse_gpu(f"NVIDIA {name.upper()}").sm == sm


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("RTX 4000", "several GPUs are called that", "RTX 4000 Ada (SM 89), RTX 4000 SFF Ada (SM 89), Quadro RTX 4000"),
        ("RTX 509", "no GPU of images/facts/gpus.yaml", "perhaps you meant GeForce RTX 5090"),
        ("Radeon", "is called that: Radeon", "give its SM, which nvidia-smi --query-gpu=compute_cap"),
        ("l", "is called that: l", "give its SM"),
        ("40", "is called that: 40", "give its SM"),
        ("", "is called that", "give its SM"),
    ],
)
def test_a_name_that_is_not_one_gpu_is_refused(name: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        gpus.parse_gpu(name)
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


@given(name=st.text())
def test_any_text_is_a_gpu_or_refused_in_words(name: str) -> None:
    with contextlib.suppress(UsageError):
        assert gpus.parse_gpu(name).sm in compat.facts().sms.keys() | compat.facts().older.keys()


@pytest.mark.parametrize("text", ["", "580.", "R580", "580..1", "latest"])
def test_a_driver_is_a_version(text: str) -> None:
    with pytest.raises(UsageError, match="not a driver version"):
        select.parse_driver(text)


def test_an_sm_may_have_a_point() -> None:
    assert gpus.parse_sm("12.0").sm == "120"
    assert gpus.parse_sm("6.1").sm == "61"
    with pytest.raises(UsageError) as caught:
        gpus.parse_sm("14.0")
    assert caught.value.message == "no chip of images/facts/nvidia.yaml has that number: 14.0"
    assert "perhaps" not in (caught.value.hint or "")


def test_the_command_prints_the_tag_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["select", "--driver", "570.124", "--gpu", "RTX 5090", "--platform", "linux/amd64"]) == 0
    out, err = capsys.readouterr()
    assert out == "appliance:llama-cu128-sm120\n"
    assert err.startswith("appliance:llama-cu128-sm120: its code for sm_120a runs on RTX 5090 (SM 120); driver 570.124")
    assert "llama-cu134-sm120    needs driver 580" in err
    assert "rendered, never built" in err
    assert "get it: python3 -m images build --only llama-cu128-sm120 --base auto" in err


@pytest.mark.thorough
def test_an_image_for_another_kind_of_machine_is_built_there(capsys: pytest.CaptureFixture[str]) -> None:
    (other,) = {AMD, ARM} - {platform_here()}
    assert command.main(["select", "--platform", other, "--sm", "90", "--driver", "580.65.06"]) == 0
    assert f"\nget it on a machine of {other}: python3 -m images build" in capsys.readouterr().err


def test_the_command_says_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--driver", "580.65.06", "--gpu", "GT 710", "--gpu", "RTX 3090", "--platform", "linux/amd64"]
    assert command.main(["select", *words]) == 0
    out, err = capsys.readouterr()
    cell = out.strip().removeprefix("appliance:")
    assert cell.startswith("llama-cu")  # of which toolkit, what was proven by now decides
    assert cell.endswith("-sm86")
    assert "left out: GT 710 (SM 35): it is of Kepler, and the matrix begins at SM 75\n" in err
    assert command.main(["select", *words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["left_out"] == [{"gpu": "GT 710 (SM 35)", "why": "it is of Kepler, and the matrix begins at SM 75"}]
    assert data["command"] == f"python3 -m images build --only {cell} --base auto"


def test_the_command_prints_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["select", "--sm", "90", "--platform", "linux/arm64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tag"] == "appliance:llama-cu134-sm90"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--driver", "580"], 2),
        (["--gpu", "RTX 509"], 2),
        (["--driver", "x", "--sm", "90"], 2),
        (["--driver", "", "--sm", "90"], 2),  # a script's empty variable, which is not "no driver told"
        (["--driver", "500", "--sm", "90", "--platform", "linux/amd64"], 10),
    ],
)
def test_the_command_says_what_it_cannot(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["select", *argv]) == code
    assert "hint: " in capsys.readouterr().err


def _at_least(driver: str, floor: str) -> bool:
    return compat.numbers(driver) >= compat.numbers(floor)


def _tried(machine: Machine) -> tuple[select.Choice, None] | tuple[None, MatrixError]:
    try:
        return select.choose(LOADED, machine), None
    except MatrixError as error:
        return None, error


def _with(changed: matrix.Cell) -> Matrix:
    return replace(LOADED, cells=tuple(changed if cell.id == changed.id else cell for cell in LOADED.cells))
