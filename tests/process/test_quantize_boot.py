"""Starts with an unquantized model and a fake llama-quantize: idle and first, kills, a full disk, damaged output."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.image_facts import dump_facts
from tests.builders import IMAGE
from tests.fakes.quick import program
from tests.mounts import fill_up, tmpfs
from tests.process.stages.boot import ROOT, Home, Serving, eventually
from tests.shapes.shape import SMALL
from tests.shapes.write import write_gguf

QUANTIZE, PERPLEXITY = program("fake_quantize"), program("fake_perplexity")
SHAPE = SMALL["gqa"]
FAST: Any = {"quantize": "Q8_0"}  # whatever this machine's memory and bandwidth let `auto` decide
# A model whose weights need more memory than everything else: F16 does not fit into LIMIT_MIB, and Q8_0 does.
BIG = replace(SHAPE, metadata={**SHAPE.metadata, "embedding_length": 2048, "feed_forward_length": 8192})
LIMIT_MIB = 480


def home_of(folder: Path) -> Home:
    home = Home.make(folder)
    (home.data / "models/small.gguf").unlink()
    write_gguf(home.data / "models/mine-F16.gguf", SHAPE, quantization="F16")
    write_gguf(folder / "q8.gguf", SHAPE, quantization="Q8_0")
    set_quantizer(home)
    set_program(home, "llama-perplexity", PERPLEXITY)
    return home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return home_of(tmp_path / "home")


def set_program(home: Home, name: str, run: Sequence[str], *knobs: str) -> None:
    path = home.folder / "engine" / name
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*run, *knobs])} "$@"\n')
    path.chmod(0o755)


def set_quantizer(home: Home, *knobs: str) -> None:
    files = ("--source", str(home.folder / "q8.gguf"), "--asked", str(home.folder / "quantized"))
    set_program(home, "llama-quantize", QUANTIZE, *files, *knobs)


def runs(home: Home) -> list[list[str]]:
    path = home.folder / "quantized"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def made(home: Home, pattern: str = "[!.]*.gguf") -> list[Path]:
    return sorted((home.data / "models/.quantized").rglob(pattern))


def rows(home: Home) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(home.command("models", "list", "--json").stdout)["models"]
    return found


def quantization(serving: Serving) -> Any:
    return serving.document("status")["quantization"]


def test_it_is_made_once_and_served_by_the_next_start(home: Home) -> None:
    set_program(home, "llama-perplexity", PERPLEXITY, "--shift", "0")
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        assert "perplexity +0.00 % ± 0.00 % over 4,096 tokens" in serving.event("quantized_loss")["message"]
        eventually(lambda: quantization(serving)["file"]["loss"], what=lambda: serving.text)
        assert not quantization(serving)["is_served"]
        serving.terminate()
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        found = quantization(serving)
        assert (found["type"], found["is_served"]) == ("Q8_0", True)
        assert found["file"]["origin"] == str(home.data / "models/mine-F16.gguf")
        (model,) = serving.ask("GET", "/v1/models", key=home.key)[1]["data"]
        assert (model["id"], model["quantization"]) == ("mine-F16", "Q8_0")
        assert "mine-F16-Q8_0" in model["aliases"]
        serving.terminate()
    assert len(runs(home)) == 1
    assert runs(home)[0][2] == "Q8_0"


def test_the_next_load_of_a_sleeping_model_takes_it(home: Home) -> None:
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        serving.event("quantized_loss")
        assert serving.ask("POST", "/models/unload", {"model": "mine-F16"}, key=home.key)[0] == 200
        eventually(lambda: serving.document("status")["phase"] == "asleep", what=lambda: serving.text)
        assert serving.chat()[0] == 200
        assert "quantized file" in serving.event("model_changed")["message"]
        assert quantization(serving)["is_served"]
        (model,) = serving.ask("GET", "/v1/models", key=home.key)[1]["data"]
        assert (model["id"], model["quantization"], model["state"]) == ("mine-F16", "Q8_0", "ready")
        serving.terminate()
    assert len(runs(home)) == 1


def test_off_and_a_quantized_model_make_nothing(home: Home) -> None:
    with home.serving(quantize="off") as serving:
        serving.wait_ready()
        assert quantization(serving) is None
        serving.terminate()
    (home.data / "models/mine-F16.gguf").unlink()
    write_gguf(home.data / "models/other.gguf", SHAPE, quantization="Q4_K_M")
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        assert quantization(serving) is None
        serving.terminate()
    assert not runs(home)


def test_an_unknown_type_is_refused(home: Home) -> None:
    done = home.command("plan", quantize="Q8")
    assert done.returncode == 10
    assert "quantize" in done.stderr
    assert "perhaps you meant 'Q8_0'" in done.stderr


def test_a_request_stops_it_and_it_goes_on(home: Home) -> None:
    hold = home.folder / "go"
    set_quantizer(home, "--hold", str(hold))
    set_program(home, "llama-perplexity", PERPLEXITY)
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        serving.event("quantize")
        eventually(lambda: runs(home), what=lambda: serving.text)
        pid = int(runs(home)[0][-1])
        with serving.stream(max_tokens=100_000) as stream:
            assert stream.recv(1)
            eventually(lambda: state_of(pid) == "T", what=lambda: f"{state_of(pid)}: {serving.text}")
        eventually(lambda: state_of(pid) in "SR", what=lambda: f"{state_of(pid)}: {serving.text}")
        hold.touch()
        serving.event("quantized")
        serving.terminate()
    assert len(runs(home)) == 1


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_kill_leaves_nothing_that_is_taken_for_a_model(home: Home) -> None:
    set_quantizer(home, "--hold", str(home.folder / "never"))
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        eventually(lambda: made(home, ".*.part"), what=lambda: serving.text)
        os.kill(serving.process.pid, signal.SIGKILL)
        serving.process.wait(60)
    assert not made(home)
    (row,) = (row for row in rows(home) if "quantizing not finished" in (row["missing"] or ""))
    assert row["state"] == "partial"
    set_quantizer(home)
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        assert not quantization(serving)["is_served"]
        serving.event("quantized")
        serving.terminate()
    assert [path.name for path in made(home)] == ["mine-F16-Q8_0.gguf"]
    assert not made(home, ".*.part")


def test_a_stop_ends_it_at_once(home: Home) -> None:
    set_quantizer(home, "--hold", str(home.folder / "never"))
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        eventually(lambda: runs(home), what=lambda: serving.text)
        serving.terminate()
    assert not made(home)
    assert not made(home, ".*.part")
    assert not Path(f"/proc/{runs(home)[0][-1]}").exists()


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (("--cut",), "wrote a damaged file"),
        (("--say", "main: failed to quantize model: something"), "llama-quantize exited with code 1"),
    ],
)
def test_a_failure_keeps_the_original(home: Home, knobs: tuple[str, ...], words: str) -> None:
    set_quantizer(home, *knobs)
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        assert words in serving.event("not_quantized")["message"]
        assert words in quantization(serving)["words"]
        assert serving.chat()[0] == 200
        serving.terminate()
    assert not made(home)
    assert not made(home, ".*.part")


def test_a_damaged_file_is_made_again(home: Home) -> None:
    with home.serving(**FAST) as serving:
        serving.event("quantized_loss")
        serving.terminate()
    (path,) = made(home)
    with path.open("r+b") as file:
        file.write(b"XXXX")  # as long as before
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        assert "damaged" in serving.event("quantization")["message"]
        assert serving.chat()[0] == 200
        serving.terminate()


def test_a_file_without_probabilities_is_refused_for_good(home: Home) -> None:
    # The fake tells nan for the second run, which reads the quantized file.
    script = home.folder / "engine/llama-perplexity"
    words = shlex.join(PERPLEXITY)
    script.write_text(f'#!/bin/sh\ncase "$*" in *Q8_0*) exec {words} --nan "$@" ;; *) exec {words} "$@" ;; esac\n')
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        assert "not finite numbers" in serving.event("quantized_refused")["message"]
        serving.terminate()
    assert not made(home)
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        assert "Q8_0 was refused" in serving.event("quantization")["message"]
        serving.terminate()
    assert len(runs(home)) == 1
    (row,) = (row for row in rows(home) if row["quantized"])
    assert "refused" in row["missing"]


def test_a_full_volume_is_told_before_and_meanwhile(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home")
    source = (home.data / "models/mine-F16.gguf").stat().st_size
    with tmpfs(tmp_path / "disk", f"size={source + 40 * 2**20}") as disk:
        home.data.rename(tmp_path / "old")
        home.data.symlink_to(disk)
        (disk / "models").mkdir()
        (disk / "models/mine-F16.gguf").write_bytes((tmp_path / "old/models/mine-F16.gguf").read_bytes())
        set_quantizer(home, "--fill")
        with home.serving(**FAST) as serving:
            serving.wait_ready()
            assert "volume became full" in serving.event("not_quantized")["message"]
            serving.terminate()
        assert not made(home, ".*.part")
        fill_up(disk / "other", 30 * 2**20)
        with home.serving(**FAST) as serving:
            serving.wait_ready()
            assert "volume has no room for mine-F16-Q8_0.gguf" in serving.event("not_quantized")["message"]
            assert serving.chat()[0] == 200
            serving.terminate()
        assert len(runs(home)) == 1


def test_the_origin_takes_its_files_along(home: Home) -> None:
    with home.serving(**FAST) as serving:
        serving.event("quantized_loss")
        serving.terminate()
    done = home.command("models", "rm", "mine-F16.gguf", "--json")
    assert done.returncode == 0, done.stderr
    assert "mine-F16-Q8_0.gguf" in done.stdout
    assert not made(home)
    assert rows(home) == []


@pytest.fixture
def small_machine(tmp_path: Path) -> Home:
    """A machine in whose memory the original does not fit, and a model that is mostly weights."""
    home = home_of(tmp_path / "home")
    write_gguf(home.data / "models/mine-F16.gguf", BIG, quantization="F16")
    write_gguf(home.folder / "q8.gguf", BIG, quantization="Q8_0")
    (home.folder / "site").mkdir()
    code = (
        f"from appliance.probe.machine.hardware import Memory\nMemory.usable_mib = property(lambda self: {LIMIT_MIB})\n"
    )
    (home.folder / "site/sitecustomize.py").write_text(code)
    home.variables = {"PYTHONPATH": f"{home.folder / 'site'}:{ROOT}"}
    return home


def test_what_does_not_fit_is_quantized_first(small_machine: Home) -> None:
    home, hold = small_machine, small_machine.folder / "go"
    set_quantizer(home, "--hold", str(hold))
    planned = json.loads(home.command("plan", "--json", **FAST).stdout)
    assert planned["quantization"]["comes_first"]
    with home.serving(**FAST) as serving:
        serving.event("quantize")

        def halfway() -> Any:
            status, document = serving.ask("GET", "/health/ready")
            assert status in (0, 503)
            return document if document and document.get("bytes_done") else None

        ready = eventually(halfway, what=lambda: serving.text)
        assert ready["phase"] == "quantizing"
        assert ready["file"] == "mine-F16-Q8_0.gguf"
        assert ready["bytes_done"] < ready["bytes_total"]
        (model,) = serving.ask("GET", "/v1/models", key=home.key)[1]["data"]
        assert model["id"] == "mine-F16"
        status, refused = serving.chat()
        assert (status, refused["error"]["code"]) == (503, "model_loading")
        hold.touch()
        serving.wait_ready()
        assert quantization(serving)["is_served"]
        assert serving.chat()[0] == 200
        assert "loss unknown" in serving.event("quantized_loss")["message"]  # the original does not fit
        serving.terminate()
    (row,) = (row for row in rows(home) if row["quantized"])
    assert "does not fit" in row["quantized"]["why_no_loss"]


def test_a_failure_of_what_comes_first_ends_the_start(small_machine: Home) -> None:
    set_quantizer(small_machine, "--cut")
    with small_machine.serving(**FAST) as serving:
        assert serving.process.wait(120) == 43
        assert "wrote a damaged file" in serving.text
    done = small_machine.command("tune", **FAST)
    assert done.returncode == 31
    assert "does not fit before it is quantized" in done.stderr


def test_an_image_without_the_program_serves_the_original(home: Home) -> None:
    (home.folder / "engine/llama-quantize").unlink()
    (home.folder / "facts/image_facts.json").write_text(dump_facts(IMAGE))
    with home.serving(**FAST) as serving:
        serving.wait_ready()
        assert quantization(serving) is None
        serving.terminate()
