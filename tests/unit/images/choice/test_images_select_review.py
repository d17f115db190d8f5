"""The table of `select` in a review of the build half, whole: each of its 33 rows, with every GPU and driver it names.

The right answer is the cell whose toolkit is the driver's own or older, or a refusal that gives the reason; the rows of
the review that said "works" or "wrong" are answered otherwise now.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from images.choice import gpus, proofs, select
from images.choice.select import Machine
from images.errors import MatrixError
from images.matrix import matrix
from images.matrix.matrix import Platform

PROJECT = Path(__file__).parents[4]
LOADED = matrix.load(PROJECT)
UNPROVEN = proofs.Record(proofs={})  # a proof may choose a newer toolkit, and every month brings one
AMD, ARM = get_args(Platform)
ROWS_OF_THE_REVIEW = 33


@dataclass(frozen=True, kw_only=True)
class Row:
    """`machines`: each a list of GPUs, and `answers`: by driver a cell, or what a refusal must say; `hint` too."""

    number: int
    machines: tuple[str, ...]  # GPUs of one machine are joined by ` + `
    answers: dict[str | None, str]
    platform: Platform = AMD
    left_out: str | None = None  # the GPU that is not served, and must be named
    hint: str = ""


OLD = "the driver is too old"
JETSON = "has no code for SM 87"
ARM_SERVER = "cards in Arm servers: no image is built for them"
ROWS = (
    Row(
        number=1,
        machines=("RTX 2060", "GTX 1650", "TITAN RTX", "T4", "Quadro RTX 6000"),
        answers={"535.183.06": "llama-cu124-sm75"},
    ),
    Row(number=2, machines=("RTX 2060 SUPER", "T4", "A100"), answers={"470.256.02": OLD, "450.80.02": OLD}),
    Row(number=3, machines=("RTX 2070 SUPER",), answers={"525.60.13": "llama-cu124-sm75"}),
    Row(number=3, machines=("RTX 4080", "L4"), answers={"525.60.13": "llama-cu124-sm89"}),
    Row(number=3, machines=("A100",), answers={"525.147.05": "llama-cu124-sm80"}),
    Row(number=3, machines=("A40",), answers={"525.147.05": "llama-cu124-sm86"}),
    Row(
        number=4,
        machines=("RTX 2080", "Quadro RTX 8000", "T1000 8GB", "MX550", "GTX 1660 SUPER"),
        answers={"550.54.15": "llama-cu124-sm75", "560.35.03": "llama-cu124-sm75"},
    ),
    Row(
        number=5,
        machines=("RTX 2080 Ti", "RTX 2080 Ti + RTX 2080 Ti", "T4"),
        answers={"580.65.06": "llama-cu130-sm75"},
    ),
    Row(number=6, machines=("RTX 3050", "RTX 3080", "A10", "A16"), answers={"535.183.06": "llama-cu124-sm86"}),
    Row(number=6, machines=("A30",), answers={"535.183.06": "llama-cu124-sm80"}),
    Row(
        number=7,
        machines=("RTX 3050 Laptop GPU", "RTX 3060", "RTX 3060 Ti", "RTX 3090", "A10G", "RTX A6000"),
        answers={"550.54.15": "llama-cu124-sm86", "560.94": "llama-cu124-sm86"},
    ),
    Row(number=8, machines=("RTX 3070", "A2"), answers={"570.124.06": "llama-cu128-sm86"}),
    Row(number=9, machines=("RTX 3090 Ti",), answers={"590.48.01": "llama-cu130-sm86"}),
    Row(
        number=10,
        machines=("RTX 4050 Laptop GPU", "RTX 4060"),
        answers=dict.fromkeys(("535.183.06", "546.33", "528.49", "537.58"), "llama-cu124-sm89"),
    ),
    Row(
        number=11,
        machines=("RTX 4090",),
        answers=dict.fromkeys(("550.40.07", "550.54.14", "550.54.15"), "llama-cu124-sm89"),
    ),
    Row(number=12, machines=("RTX 4090",), answers={"550": "llama-cu124-sm89"}),
    Row(
        number=13,
        machines=("RTX 4070", "RTX 4070 Ti SUPER", "RTX 6000 Ada Generation", "L40", "RTX 4090 Laptop GPU"),
        answers={"550.54.15": "llama-cu124-sm89", "552.44": "llama-cu124-sm89", "572.16": "llama-cu128-sm89"},
    ),
    Row(
        number=14,
        machines=("RTX 4080 SUPER", "RTX 4090 D", "L40S"),
        answers=dict.fromkeys(("580.65.06", "581.29", "591.44"), "llama-cu130-sm89"),
    ),
    Row(
        number=15,
        machines=(
            *("RTX 5050", "RTX 5060", "RTX 5070", "RTX 5080", "RTX 5090"),
            *(f"RTX PRO 6000 Blackwell {kind} Edition" for kind in ("Server", "Workstation", "Max-Q Workstation")),
        ),
        answers={"570.26": "llama-cu128-sm120", "575.57.08": "llama-cu128-sm120"},
    ),
    Row(
        number=16,
        machines=("RTX 5080", "RTX 5090", "RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 4000 Blackwell"),
        answers={
            **dict.fromkeys(("580.65.06", "590.48.01", "595.58.03"), "llama-cu130-sm120"),
            "615.71.09": "llama-cu134-sm120",
        },
    ),
    Row(number=17, machines=("RTX 5090",), answers={"565.57.01": OLD}),
    Row(
        number=18,
        machines=("H100", "H200"),
        answers={"535.183.06": "llama-cu124-sm90", "550.54.15": "llama-cu124-sm90", "570.124.06": "llama-cu128-sm90"},
    ),
    Row(
        number=18,
        machines=("GH200",),
        platform=ARM,
        answers={"535.183.06": OLD, "550.54.15": "llama-cu128-sm90", "570.124.06": "llama-cu128-sm90"},
    ),
    Row(number=19, machines=("H100", "H200 NVL"), answers={"580.65.06": "llama-cu130-sm90"}),
    Row(number=20, machines=("B200",), answers={"570.124.06": "llama-cu128-sm100", "580.65.06": "llama-cu130-sm100"}),
    Row(
        number=20,
        machines=("GB200",),
        platform=ARM,
        answers={"570.124.06": "llama-cu128-sm100", "580.65.06": "llama-cu130-sm100"},
    ),
    Row(number=21, machines=("B300",), answers={"580.65.06": "llama-cu130-sm103"}),
    Row(number=21, machines=("GB300",), platform=ARM, answers={"580.65.06": "llama-cu130-sm103"}),
    Row(number=22, machines=("B300",), answers={"570.124.06": OLD}),
    Row(number=23, machines=("B200 + B300",), answers={"580.65.06": "llama-cu130-sm100"}),
    Row(number=23, machines=("RTX 3060 + RTX 3090 + A100",), answers={"580.65.06": "llama-cu130-sm80"}),
    Row(number=23, machines=("RTX 3090 + RTX 4090",), answers={"580.65.06": "llama-cu130-sm86"}),
    Row(
        number=24,
        machines=("RTX 3090 + RTX 5090", "RTX 4090 + RTX 5090"),
        answers={"580.65.06": "llama-cu130-sm86-sm120"},
    ),
    Row(
        number=24,
        machines=("RTX 2080 Ti + RTX 3090", "RTX 3090 + RTX 2080 Ti"),
        answers={"580.65.06": "llama-cu130-sm86"},
        left_out="RTX 2080 Ti (SM 75)",
    ),
    Row(
        number=24,
        machines=("A100 + H100", "H100 + A100"),
        answers={"580.65.06": "llama-cu130-sm90"},
        left_out="A100 (SM 80)",
    ),
    Row(
        number=25,
        machines=("V100", "TITAN V"),
        answers=dict.fromkeys(("535.183.06", "580.65.06"), "CUDA 12 can make code for SM 70, and no image of it is"),
    ),
    Row(number=26, machines=("P40", "P100", "GTX 1080 Ti", "GTX 1060"), answers={"535.183.06": "it is of Pascal, and"}),
    Row(number=26, machines=("K80",), answers={"470.256.02": "it is of Kepler, and the matrix begins at SM 75"}),
    Row(number=26, machines=("M40",), answers={"535.183.06": "it is of Maxwell, and the matrix begins at SM 75"}),
    Row(number=27, machines=("P40 + RTX 3090",), answers={"550.54.15": "llama-cu124-sm86"}, left_out="P40 (SM 61)"),
    Row(
        number=27, machines=("GT 710 + RTX 3090",), answers={"550.54.15": "llama-cu124-sm86"}, left_out="GT 710 (SM 35)"
    ),
    Row(number=27, machines=("P40 + RTX 3090", "GT 710 + RTX 3090"), answers={"470.256.02": OLD}),
    Row(number=28, machines=("A800",), answers={"580.65.06": "llama-cu130-sm80"}),
    Row(number=28, machines=("H800", "H20"), answers={"580.65.06": "llama-cu130-sm90"}),
    Row(number=28, machines=("L20", "RTX 1000 Ada Generation"), answers={"580.65.06": "llama-cu130-sm89"}),
    Row(number=28, machines=("RTX A5500",), answers={"580.65.06": "llama-cu130-sm86"}),
    Row(number=28, machines=("B100",), answers={"580.65.06": "llama-cu130-sm100"}),
    Row(
        number=29,
        machines=("Orin (nvgpu)", "Jetson Orin Nano"),
        platform=ARM,
        answers={"540.4.0": JETSON, "36.4.4": JETSON},
    ),
    Row(number=30, machines=("Orin",), platform=ARM, answers={"580.00": JETSON}),
    Row(number=31, machines=("Thor",), platform=ARM, answers={"580.00": "llama-cu130-sm110"}),
    Row(
        number=31,
        machines=("GB10",),
        platform=ARM,
        answers={"575.51.03": "llama-cu129-sm121", "580.95.05": "llama-cu130-sm121"},
    ),
    Row(
        number=32,
        machines=("A100", "L4", "RTX 4090", "RTX A6000"),
        platform=ARM,
        answers={"550.54.15": ARM_SERVER, "580.65.06": ARM_SERVER},
        hint="appliance:llama-cpu runs on the CPU alone",
    ),
    Row(number=33, machines=("",), answers={None: "llama-cpu"}),
    Row(number=33, machines=("",), platform=ARM, answers={None: "llama-cpu"}),
)
QUESTIONS = [
    pytest.param(row, machine, driver, id=f"{row.number}-{machine or 'no GPU'}-{driver}-{row.platform[6:]}")
    for row in ROWS
    for machine in row.machines
    for driver in row.answers
]


def test_every_row_of_the_review_is_asked() -> None:
    assert sorted({row.number for row in ROWS}) == list(range(1, ROWS_OF_THE_REVIEW + 1))


@pytest.mark.parametrize(("row", "machine", "driver"), QUESTIONS)
def test_a_row_of_the_review_is_right_or_gives_the_reason(row: Row, machine: str, driver: str | None) -> None:
    names = [name for name in machine.split(" + ") if name]
    asked = Machine(platform=row.platform, gpus=tuple(map(gpus.parse_gpu, names)), driver=driver)
    answer = row.answers[driver]
    if not answer.startswith("llama-"):
        with pytest.raises(MatrixError) as caught:
            select.choose(LOADED, asked, record=UNPROVEN)
        assert answer in caught.value.message
        assert (caught.value.exit_code, bool(caught.value.hint)) == (10, True)
        assert row.hint in str(caught.value.hint)
        return
    choice = select.choose(LOADED, asked, record=UNPROVEN)
    assert choice.cell == answer
    assert [each.gpu for each in choice.left_out] == ([row.left_out] if row.left_out else [])


@pytest.mark.parametrize(
    ("name", "driver", "platform", "answer"),
    [
        *((name, "580.65.06", AMD, "vllm-cu130") for name in ("T4", "A100", "RTX 3090", "RTX 4090", "H200", "B200")),
        ("RTX 5090", "580.65.06", AMD, "vllm-cu130"),
        *((name, "580.95.05", ARM, "vllm-cu130") for name in ("GH200", "GB200", "GB300", "GB10")),
        *((name, "615.71.09", AMD, "vllm-cu130") for name in ("L40S", "B300", "RTX PRO 6000 Blackwell Server Edition")),
        ("Thor", "580.00", ARM, "vllm-cu130"),
        *((name, "570.124.06", AMD, OLD) for name in ("RTX 4090", "H100", "RTX 5090")),
        ("RTX 4090", "580.10", AMD, OLD),  # its wheels leave PTX to the driver, which CUDA's own alone compiles
        ("Orin", "580.00", ARM, "80 does not pass to a Jetson"),
        ("V100", "580.65.06", AMD, "the matrix begins at SM 75"),
        ("A100", "580.65.06", ARM, ARM_SERVER),
    ],
)  # fmt: skip
def test_the_cell_of_vllm(name: str, driver: str, platform: Platform, answer: str) -> None:
    """One for a release of CUDA, whose wheel carries every chip."""
    asked = Machine(platform=platform, gpus=(gpus.parse_gpu(name),), driver=driver)
    if answer.startswith("vllm-"):
        assert select.choose(LOADED, asked, engine="vllm", record=UNPROVEN).cell == answer
        return
    with pytest.raises(MatrixError) as caught:
        select.choose(LOADED, asked, engine="vllm", record=UNPROVEN)
    assert answer in caught.value.message
    assert caught.value.hint
