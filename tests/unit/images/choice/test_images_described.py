"""The machine of a file: `images select` and `appliance plan --machine` read the same of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.errors import FatalError as ApplianceError
from appliance.image_facts import ImageFacts, parse_image_facts
from appliance.probe import as_document
from appliance.probe.machine.described import parse_machine
from appliance.settings import resolve_settings
from appliance.start.checks import check_supported
from images import __main__ as command
from images.choice import described, select
from images.errors import FatalError, MatrixError
from images.matrix import matrix
from tests.fakes.machines import MACHINES, hardware_of

ROOT = Path(__file__).parents[4]
LOADED = matrix.load(ROOT)
CELLS = {cell.id: cell for cell in LOADED.cells if cell.engine.name == "llama"}
HAND = "cpu: {logical: 8, isa: [avx2]}\nmemory: {total_mib: 64000}\ngpus:\n  driver: 580.95.05\n  gpus: [%s]\n"


def image_facts(cell: str) -> ImageFacts:
    return parse_image_facts((ROOT / CELLS[cell].folder / "image_facts.json").read_text())


def document_of(name: str) -> str:
    return json.dumps(as_document(hardware_of(name)))


def refuses(cell: str, text: str) -> tuple[str, ...] | ApplianceError:
    """Return the warnings of a start of this cell's image on that machine, or the error that stops the start."""
    try:
        return check_supported(resolve_settings({}, {}), image_facts(cell), parse_machine(text, "m").hardware)
    except ApplianceError as error:
        return error


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in MACHINES if name != "old-driver"])
def test_select_and_plan_agree_on_every_cell(name: str) -> None:
    text = document_of(name)
    machine = described.parse_machine(text.encode(), "m", "linux/amd64")
    choice = select.choose(LOADED, machine)
    said = refuses(choice.cell, text)
    assert isinstance(said, tuple), said
    assert len(said) == len(choice.left_out)
    for loser in choice.runners_up:
        runs = loser.why.startswith(("runs too", "does not serve", "cannot be built yet"))
        if machine.platform in CELLS[loser.cell].platforms:
            assert isinstance(refuses(loser.cell, text), tuple) is runs, (loser, refuses(loser.cell, text))


def test_a_driver_that_no_image_takes_is_refused_by_both() -> None:
    text = document_of("old-driver")
    with pytest.raises(MatrixError, match="the driver is too old"):
        select.choose(LOADED, described.parse_machine(text.encode(), "m", "linux/amd64"))
    assert not any(isinstance(refuses(cell, text), tuple) for cell in CELLS)


def test_without_a_gpu_both_take_the_cpu() -> None:
    text = "cpu: {logical: 8, isa: [avx2]}\nmemory: {total_mib: 16000}\n"
    choice = select.choose(LOADED, described.parse_machine(text.encode(), "m", "linux/arm64"))
    assert choice.cell == "llama-cpu"
    assert refuses("llama-cpu", text) == ()


def test_the_verb_takes_a_file_and_stdin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    path.write_text(document_of("2x2080ti-22g"))
    assert command.main(["select", "--machine", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cell"] == "llama-cu130-sm75"


def test_a_doctors_bundle_will_do() -> None:
    bundle = {"appliance": "1", "hardware": json.loads(document_of("t4"))}
    machine = described.parse_machine(json.dumps(bundle).encode(), "b", "linux/arm64")
    assert (machine.driver, machine.platform, [gpu.sm for gpu in machine.gpus]) == ("525.85.12", "linux/amd64", ["75"])


def test_a_name_alone_tells_the_chip() -> None:
    (gpu,) = described.parse_machine((HAND % "{name: RTX 5090}").encode(), "m", "linux/amd64").gpus
    assert (gpu.sm, gpu.memory_gib) == ("120", 32.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "it holds no keys"),
        ("{", "Expecting property name"),
        ("a: &x [1]\nb: *x", "aliases are not taken"),
        ("hardware: 1\ncpu: 2", "hardware: holds keys"),
        ("gpus: [1]", "gpus: holds keys"),
        ("gpus: {gpus: 1}", "gpus.gpus: is a list"),
        ("gpus: {driver: new, gpus: []}", "not a driver version: 'new'"),
        (HAND % "{vram_total_mib: 8000}", "gpus.gpus[0]: neither name nor sm"),
        (HAND % "{name: Voodoo 2}", "gpus.gpus[0]: no GPU of"),
        (HAND % "{name: RTX 5090, vram_total_mib: true}", "gpus.gpus[0].vram_total_mib: it is no amount of memory"),
        (HAND % "{name: RTX 5090, vram_total_mib: -1}", "gpus.gpus[0].vram_total_mib: it is no amount of memory"),
        (HAND % "{name: RTX 5090, vram_total_mib: .nan}", "gpus.gpus[0].vram_total_mib: it is no amount of memory"),
        (HAND % "{name: A, sm: x}", "gpus.gpus[0].sm: it is no compute capability"),
        (HAND % '{name: "\\e[2JRTX 4090", sm: "89"}', "gpus.gpus[0].name: it holds control characters"),
        ("[" * 9000 + "]" * 9000, "recursion"),
    ],
)
def test_a_file_that_cannot_be_is_10_with_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(MatrixError, match="machine file") as caught:
        described.read_machine(str(path), "linux/amd64")
    assert words in caught.value.message
    assert str(path) in caught.value.message


def test_no_file_is_10_and_two_descriptions_are_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.json")
    assert command.main(["select", "--machine", missing]) == 10
    assert f"machine file {missing}: it cannot be read: No such file" in capsys.readouterr().err
    assert command.main(["select", "--machine", missing, "--gpu", "RTX 4090"]) == 2


def test_no_name_of_a_file_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["select", "--machine", f"{tmp_path}/\x1b[31mm.json"]) == 10
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "x1b[31mm.json" in said


def test_what_is_too_large_is_not_read_on(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for text, words in (("{" + " " * 2**22, "4096 KiB"), ("a: " + "b" * 2**17, "64 KiB")):
        path.write_text(text)
        with pytest.raises(FatalError, match=words):
            described.read_machine(str(path), "linux/amd64")
