"""This machine as nvidia-smi tells it: old drivers, cards that fell silent, and cards that nobody knows."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images import docker
from images.choice import select, smi
from images.errors import MatrixError
from images.matrix import matrix

LOADED = matrix.load(Path(__file__).parents[4])
LOST = "Unable to determine the device handle for GPU 0000:41:00.0: GPU is lost.  Reboot the system to recover this GPU"


def _said(*lines: str, code: int = 0) -> docker.Finished:
    return docker.Finished(code=code, lines=lines)


class Smi:
    """An nvidia-smi of an old driver: it refuses the fields that it does not know, one at a time."""

    def __init__(self, *rows: dict[str, str]) -> None:
        self.rows = rows
        self.runs = 0

    def __call__(self, words: tuple[str, ...]) -> docker.Finished:
        self.runs += 1
        fields = words[1].removeprefix("--query-gpu=").split(",")
        missing = next((field for field in fields if field not in self.rows[0]), None)
        if missing:
            return _said(f'Field "{missing}" is not a valid field to query.', "", code=2)
        return _said(*(", ".join(row[field] for field in fields) for row in self.rows))


def test_a_driver_that_does_not_know_a_field_is_asked_without_it() -> None:
    """Driver 470 does not know compute_cap. The names of the GPUs tell the chips, and the refusal says what would
    help."""
    run = Smi({"name": "Tesla T4", "driver_version": "470.256.02", "memory.total": "15360"})
    machine = smi.query_machine(run, "linux/amd64")
    assert run.runs == 2
    assert [(gpu.sm, gpu.memory_gib) for gpu in machine.gpus] == [("75", 15)]
    with pytest.raises(MatrixError, match=r"the driver is too old: 470\.256\.02") as caught:
        select.choose(LOADED, machine)
    assert caught.value.hint == "driver 525 or newer would do, for llama-cu124-sm75"


@given(st.sets(st.sampled_from(smi.FIELDS[1:])))
def test_any_field_may_be_missing(missing: set[str]) -> None:
    whole = dict(zip(smi.FIELDS, ("NVIDIA H200", "580.65.06", "9.0", "143771"), strict=True))
    machine = smi.query_machine(
        Smi({name: value for name, value in whole.items() if name not in missing}), "linux/amd64"
    )
    assert [gpu.sm for gpu in machine.gpus] == ["90"]
    assert machine.driver == (None if "driver_version" in missing else "580.65.06")


def test_a_field_that_was_not_asked_for_is_no_reason_to_ask_again() -> None:
    said = _said('Field "name" is not a valid field to query.', code=2)
    with pytest.raises(MatrixError, match="nvidia-smi failed with exit 2"):
        smi.query_machine(lambda _: said, "linux/amd64")


@pytest.mark.parametrize("code", [0, 15])
def test_a_card_that_fell_silent_is_named_and_hides_no_other(code: int) -> None:
    machine = smi.parse(_said("NVIDIA GeForce RTX 3090, 580.65.06, 8.6, 24576", LOST, code=code), "linux/amd64")
    choice = select.choose(LOADED, machine)
    assert choice.cell == "llama-cu130-sm86"
    why = "it does not answer: GPU is lost.  Reboot the system to recover this GPU"
    assert [(each.gpu, each.why) for each in choice.left_out] == [("GPU 0000:41:00.0", why)]


def test_a_card_that_nobody_knows_is_named_and_left_out() -> None:
    lines = ("[Unknown Error], [N/A], [N/A], [N/A]", "NVIDIA GeForce RTX 5090, 580.65.06, 12.0, 32607")
    machine = smi.parse(_said(*lines), "linux/amd64")
    choice = select.choose(LOADED, machine)
    assert (choice.cell, machine.driver) == ("llama-cu130-sm120", "580.65.06")
    assert [(each.gpu, each.why) for each in choice.left_out] == [("[Unknown Error]", smi.NOBODY_KNOWS)]


def test_cards_that_nobody_knows_are_no_machine_without_a_gpu() -> None:
    machine = smi.parse(_said("Graphics Device, 450.1, [N/A], [N/A]"), "linux/amd64")
    with pytest.raises(MatrixError, match="no GPU of this machine says what it is: Graphics Device: neither") as caught:
        select.choose(LOADED, machine)
    assert "--sm NN" in str(caught.value.hint)


def test_a_remark_below_the_answer_is_no_row() -> None:
    lines = ("NVIDIA H200, 580.95.05, 9.0, 143771", "WARNING: infoROM is corrupted at gpu 0000:01:00.0")
    assert [gpu.sm for gpu in smi.parse(_said(*lines), "linux/amd64").gpus] == ["90"]


@given(st.lists(st.text(), max_size=4), st.integers(0, 255))
def test_any_answer_is_a_machine_or_a_refusal_in_words(lines: list[str], code: int) -> None:
    machine = None
    with contextlib.suppress(MatrixError):
        machine = smi.parse(_said(*lines, code=code), "linux/amd64")
    assert machine is None or code in (0, 127) or machine.unknown or smi.NO_DEVICES in " ".join(lines).casefold()


def test_what_nvidia_smi_says() -> None:
    lines = ["NVIDIA H200, 580.95.05, 9.0, 143771", "NVIDIA H200, 580.95.05, 9.0, 143771"]
    machine = smi.parse(docker.Finished(code=0, lines=tuple(lines)), "linux/amd64")
    assert (machine.platform, machine.driver) == ("linux/amd64", "580.95.05")
    assert [(gpu.name, gpu.sm, gpu.memory_gib) for gpu in machine.gpus] == [("NVIDIA H200", "90", 143771 / 1024)] * 2
    assert machine.gpus[0].bandwidth_gb_s == 4890
    (by_name,) = smi.parse(docker.Finished(code=0, lines=("Tesla T4, 450.1, [N/A], [N/A]",)), "linux/amd64").gpus
    assert (by_name.sm, by_name.memory_gib) == ("75", 16)


def test_the_number_counts_where_the_name_is_not_known() -> None:
    """A card that no file lists, a chip that no file lists, and a display card from before CUDA's last releases."""
    lines = [
        "NVIDIA RTX 9999, 580.65.06, 8.6, 24576",
        "NVIDIA X1, 580.65.06, 14.0, 99999",
        "GeForce GT 710, 580.65.06, 3.5, 2001",
    ]
    choice = select.choose(LOADED, smi.parse(docker.Finished(code=0, lines=tuple(lines)), "linux/amd64"))
    assert choice.cell == "llama-cu130-sm86"
    assert [each.gpu for each in choice.left_out] == ["NVIDIA X1 (SM 140)", "GeForce GT 710 (SM 35)"]


@pytest.mark.parametrize(
    ("code", "lines"), [(127, ["nvidia-smi: No such file or directory"]), (6, ["No devices were found"])]
)
def test_no_gpu_means_the_cpu(code: int, lines: list[str]) -> None:
    machine = smi.parse(docker.Finished(code=code, lines=tuple(lines)), "linux/amd64")
    assert select.choose(LOADED, machine).cell == "llama-cpu"


@pytest.mark.parametrize(
    ("code", "lines"),
    [(9, ["NVIDIA-SMI has failed because it couldn't communicate"]), (0, []), (0, ["Unable to determine the handle"])],
)
def test_a_failing_nvidia_smi_is_said_and_not_taken_for_no_gpu(code: int, lines: list[str]) -> None:
    with pytest.raises(MatrixError) as caught:
        smi.parse(docker.Finished(code=code, lines=tuple(lines)), "linux/amd64")
    assert f"nvidia-smi failed with exit {code}: {' '.join(lines) or 'it said nothing'}" == caught.value.message
    assert "--driver" in (caught.value.hint or "")
