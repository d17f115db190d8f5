"""Files of saved prompts that are damaged, foreign or no files: the real engine passes each over and loses nothing."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cache_restart import Engine, Rig, tokens, wait_saved
from tests.process.stages.engine import find_engine
from tests.shapes.shape import SMALL
from tests.shapes.write import write_gguf

Spoil = Callable[[Path, random.Random], None]
COUNT = 600
FIRST, SECOND = (tokens(random.Random(seed), COUNT) for seed in (1, 2))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """A folder with the two prompts, saved by two runs of the engine: a killed one and a stopped one."""
    folder = tmp_path_factory.mktemp("rig")
    model = write_gguf(folder / "model.gguf", SMALL["falcon-h1"], quantization="Q8_0", with_data=True)
    made = Rig(
        engine=find_engine("llama-server"), model=model, folder=folder / "prompts", context=4096, log=folder / "log"
    )
    with made.running() as engine:
        engine.complete(FIRST)
        wait_saved(made)
    with made.running() as engine:
        engine.complete(SECOND)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(10) == 0
    assert len(made.files()) == 2
    return made


@pytest.fixture
def copied(rig: Rig, tmp_path: Path) -> Rig:
    """The same prompts in a folder of its own."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for path in rig.files():
        (folder / path.name).write_bytes(path.read_bytes())
    return replace(rig, folder=folder, log=tmp_path / "log")


def lines(rig: Rig) -> list[str]:
    """Return what the engine tells of files that it does not use."""
    text = rig.log.read_text("utf-8", errors="replace")
    return [line.partition("prompt disk: ")[2] for line in text.splitlines() if "prompt disk: passed over" in line]


def file_of(rig: Rig, prompt: list[int]) -> Path:
    packed = b"".join(token.to_bytes(4, "little") for token in prompt)
    (found,) = (path for path in rig.files() if packed in path.read_bytes())
    return found


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def change_a_byte(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def fill_with_noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def empty(path: Path, _: random.Random) -> None:
    path.write_bytes(b"")


def as_folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path, _: random.Random) -> None:
    data = path.read_bytes()
    path.unlink()
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_bytes(data)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spoil", [cut, change_a_byte, fill_with_noise])
def test_a_damaged_file_is_passed_over_and_removed(copied: Rig, spoil: Spoil, seed: int) -> None:
    spoiled, other = file_of(copied, FIRST), file_of(copied, SECOND)
    whole = other.read_bytes()
    spoil(spoiled, random.Random(seed))
    with copied.running() as engine:
        assert engine.complete(FIRST)["timings"]["disk_n"] == 0
        assert engine.complete(SECOND)["timings"]["disk_n"] >= COUNT - 8
        (line,) = lines(copied)
        assert line.startswith(f"passed over {spoiled.name}: ")
        assert not spoiled.exists()
        assert other.read_bytes() == whole


def test_the_next_best_file_is_read_if_the_best_is_damaged(copied: Rig) -> None:
    """A file that is cut is smaller, so it is looked at first."""
    whole = file_of(copied, FIRST)
    half = whole.read_bytes()[: whole.stat().st_size * 3 // 4]
    (copied.folder / "0.none.0000000000000000.prompt").write_bytes(half)
    with copied.running() as engine:
        assert engine.complete(FIRST)["timings"]["disk_n"] >= COUNT - 8
        assert [line.partition(":")[0] for line in lines(copied)] == ["passed over 0.none.0000000000000000.prompt"]
        assert whole.exists()


def test_without_a_key_nothing_is_kept(copied: Rig) -> None:
    before = copied.files()
    with replace(copied, key="").running() as engine:
        assert "disk_n" not in engine.complete(FIRST)["timings"]
    assert copied.files() == before
    assert "prompt disk: off: without --cache-disk-key" in copied.log.read_text("utf-8")


@pytest.mark.parametrize("seed", range(12))
def test_a_stop_in_mid_decode_ends_and_keeps_the_prompt(rig: Rig, tmp_path: Path, seed: int) -> None:
    """A third of these stops hung while the signal's handler itself took the queue's lock."""
    apart = replace(rig, folder=tmp_path / "prompts")
    body = json.dumps({"prompt": FIRST, "n_predict": 3000, "ignore_eos": True, "stream": True})
    with apart.running() as engine, contextlib.closing(http.client.HTTPConnection("127.0.0.1", engine.port)) as asked:
        asked.request("POST", "/completion", body, {"Content-Type": "application/json"})
        reply = asked.getresponse()
        for _ in range(2 + random.Random(seed).randrange(60)):
            reply.readline()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(10) == 0
    assert len(apart.files()) == 1


@pytest.mark.parametrize("spoil", [empty, as_folder, as_pipe, as_link])
def test_what_is_no_saved_prompt_is_passed_over(copied: Rig, spoil: Spoil) -> None:
    spoiled = file_of(copied, FIRST)
    spoil(spoiled, random.Random(0))
    with copied.running() as engine:
        assert engine.complete(FIRST)["timings"]["disk_n"] == 0
        assert engine.complete(SECOND)["timings"]["disk_n"] >= COUNT - 8
        (line,) = lines(copied)
        assert line.startswith(f"passed over {spoiled.name}: ")


def as_the_other_prompt(path: Path, _: random.Random) -> None:
    (other,) = (each for each in path.parent.iterdir() if each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("spoil", [as_the_other_prompt, as_folder, as_pipe, as_link, cut])
def test_a_file_that_is_replaced_while_the_engine_runs_is_passed_over(copied: Rig, spoil: Spoil) -> None:
    spoiled = file_of(copied, FIRST)
    with copied.running() as engine:
        spoil(spoiled, random.Random(0))
        assert engine.complete(FIRST)["timings"]["disk_n"] == 0
        assert engine.complete(SECOND)["timings"]["disk_n"] >= COUNT - 8
        (line,) = lines(copied)
        assert line.startswith(f"passed over {spoiled.name}: ")


def test_a_name_of_a_file_makes_no_line_of_its_own(copied: Rig) -> None:
    (copied.folder / "evil\nprompt disk: loaded \x1b[2J.prompt").write_bytes(b"")
    with copied.running():
        assert lines(copied) == ["passed over evil?prompt disk: loaded ?[2J.prompt: cut off"]


def ask_as(engine: Engine, owner: str, prompt: list[int]) -> int:
    """Ask as the gateway does for an API key; return the status."""
    body = json.dumps({"prompt": prompt, "n_predict": 2})
    status, _ = engine.ask("POST", "/completion", body, 60.0, **{"X-Cache-Owner": owner})
    return status


def test_a_prompt_stays_that_of_who_asked_it(rig: Rig, tmp_path: Path) -> None:
    """A refused request begins as the prompt that a slot holds, and never becomes its owner."""
    apart = replace(rig, folder=tmp_path / "prompts", context=2048)
    with apart.running() as engine:
        assert ask_as(engine, "alice", FIRST) == 200
        assert ask_as(engine, "bob", [*FIRST[:400], *tokens(random.Random(3), 3000)]) == 400
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(10) == 0
    assert [path.name.split(".")[1] for path in apart.files()] == ["alice"]


def test_prompts_of_another_key_stay_and_are_told_in_one_line(copied: Rig) -> None:
    before = {path: path.read_bytes() for path in copied.files()}
    with replace(copied, key="1").running() as engine:
        assert engine.complete(FIRST)["timings"]["cache_n"] == 0
        assert lines(copied) == ["passed over 2 saved prompts of another model, build, setting or user"]
        assert {path: path.read_bytes() for path in before} == before


def test_prompts_of_another_secret_are_never_read(copied: Rig) -> None:
    with replace(copied, secret="f" * 32).running() as engine:
        assert engine.complete(FIRST)["timings"]["cache_n"] == 0
        assert all(line.endswith(": wrong checksum") for line in lines(copied))
        assert len(lines(copied)) == 2


def test_a_context_that_is_too_small_is_named(copied: Rig) -> None:
    with replace(copied, context=512).running() as engine:
        assert engine.complete(FIRST[:400])["timings"]["disk_n"] == 0
        (line,) = lines(copied)
        assert line.endswith(f"{COUNT} tokens do not fit a context of 512")


def test_the_least_worth_goes_first_and_the_bound_holds(copied: Rig) -> None:
    size = max(path.stat().st_size for path in copied.files())
    limited = replace(copied, limit_mib=3 * size // 2**20 + 1)
    for seed in range(10, 16):
        with limited.running() as engine:
            engine.complete(tokens(random.Random(seed), COUNT))
            engine.process.send_signal(signal.SIGTERM)
            assert engine.process.wait(10) == 0
        assert sum(path.stat().st_size for path in limited.files()) <= limited.limit_mib * 2**20
    if "worth more than this prompt" in limited.log.read_text("utf-8", errors="replace"):
        pytest.skip("the machine was busy before: the prefills of other prompts took more than twice as long")
    with limited.running() as engine:
        assert engine.complete(tokens(random.Random(15), COUNT))["timings"]["disk_n"] >= COUNT - 8


def test_unfinished_files_of_the_dead_go_and_those_of_the_living_stay(copied: Rig) -> None:
    dead, living = copied.folder / ".0.none.dead.prompt.tmp", copied.folder / ".0.none.living.prompt.tmp"
    dead.write_bytes(b"x")
    with living.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with copied.running():
            assert (dead.exists(), living.exists()) == (False, True)
