"""`make up`'s last step against an engine with knobs: whatever goes wrong is said in words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.fakes.fake_docker import TOKEN_S
from tests.signals import hear_all

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/fakes/fake_docker.py"


@contextmanager
def engine(*knobs: str) -> Iterator[str]:
    with engine_told(*knobs) as (address, _):
        yield address


@contextmanager
def engine_told(*knobs: str) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield the fake Docker engine's address, and a function that ends it and returns the restart policies that it was
    told."""
    with subprocess.Popen([sys.executable, str(FAKE), *knobs], stdout=subprocess.PIPE, text=True) as fake:
        try:
            assert fake.stdout
            yield fake.stdout.readline().strip(), lambda: policies(fake)
        finally:
            fake.kill()


def policies(fake: subprocess.Popen[str]) -> list[str]:
    fake.kill()
    assert fake.stdout
    return [line.strip().removeprefix("restarts: ") for line in fake.stdout]


@contextmanager
def begin(address: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The program, killed at the end if it still runs."""
    argv = [sys.executable, "-m", "appliance.host.verbs.up", "c1", *words]
    environment = {**os.environ, "DOCKER_HOST": address}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment, text=True, preexec_fn=hear_all, stdout=pipe, stderr=pipe
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def ended(*knobs: str, words: tuple[str, ...] = ()) -> tuple[int, str, str]:
    with engine(*knobs) as address, begin(address, *words) as program:
        out, err = program.communicate(timeout=90)
    assert "Traceback" not in err, err
    return program.returncode, out, err


def test_it_asks_and_reports() -> None:
    code, out, err = ended()
    assert code == 0, err
    assert "It guides ships at night." in out
    rate = re.search(r"\(5 tokens at ([0-9.]+) tok/s\)", out)
    assert rate
    assert 0 < float(rate[1]) <= 10 / TOKEN_S  # where the first was read late, the others seem to come faster
    assert "speed     10 tok/s\n" in out
    assert "in the profile on the volume" in out


@pytest.mark.parametrize("state", ["waiting", "measuring"])
def test_the_first_answer_comes_with_the_predicted_speed_and_that_measuring_goes_on(state: str) -> None:
    code, out, err = ended("--tuning", state)
    assert code == 0, err
    assert "It guides ships at night." in out
    assert "speed     predicted: 12 tok/s of decode" in out
    assert "measuring continues while idle" in out
    assert "`make up WAIT=tuned` waits for it" in out


def test_without_measuring_nothing_is_said_to_go_on() -> None:
    code, out, err = ended("--tuning", "off")
    assert code == 0, err
    assert "by prediction; nothing is measured" in out
    assert "goes on" not in out


def test_where_no_measured_plan_fits_the_speed_is_predicted_and_that_is_said() -> None:
    code, out, err = ended("--status-document", "unfit")
    assert code == 0, err
    assert "speed     predicted: 12 tok/s of decode" in out
    assert "by prediction; no measured plan fits now" in out


def test_what_this_start_measured_is_told_from_what_lay_on_the_volume() -> None:
    code, out, err = ended("--status-document", "new")
    assert code == 0, err
    assert "by measuring, just now" in out


def test_who_waits_for_measuring_gets_the_measured_plan() -> None:
    code, out, err = ended("--tuning", "waiting", words=("--wait", "tuned"))
    assert code == 0, err
    assert "measuring: 1 measurements so far" in err
    assert "speed     10 tok/s\n" in out
    assert "predicted" not in out


@pytest.mark.parametrize(
    ("state", "expected", "hint"), [("off", 10, "APPLIANCE_TUNE=idle"), ("failed", 43, "docker logs")]
)
def test_a_wait_without_an_end_is_refused(state: str, expected: int, hint: str) -> None:
    code, _, err = ended("--tuning", state, words=("--wait", "tuned"))
    assert code == expected
    assert f"error: measuring will not finish: it is {state}" in err
    assert hint in err


def test_another_word_to_wait_for_is_usage() -> None:
    code, _, err = ended(words=("--wait", "forever"))
    assert code == 2
    assert "invalid choice: 'forever'" in err


@pytest.mark.parametrize("ports", ["exposed", "absent", "none"])
def test_a_port_that_is_not_published_is_said_once(ports: str) -> None:
    code, _, err = ended("--ports", ports)
    assert code == 10
    assert err.count("error: one cannot be asked: it publishes no port 11435") == 1
    assert "hint: start it with -p 127.0.0.1:11435:11435" in err


@pytest.mark.parametrize(
    ("document", "shown"), [("error", "shutting down"), ("list", "the answer is not a JSON object: '[1]'")]
)
def test_another_document_than_the_status_is_shown(document: str, shown: str) -> None:
    code, _, err = ended("--status-document", document)
    assert code == 43
    assert f"error: the container does not report its state: {shown}\n" in err
    assert "docker logs one" in err


def test_of_an_answer_that_came_at_once_no_speed_is_said() -> None:
    code, out, err = ended("--answer", "at-once")
    assert code == 0, err
    assert "It guides ships at night.  (5 tokens)\n" in out


def test_an_answer_that_breaks_off_is_43_with_what_was_said() -> None:
    code, out, err = ended("--answer", "error")
    assert (code, out) == (43, "")
    assert "error: the appliance refuses: shutting down" in err


def test_a_container_that_is_removed_meanwhile_is_said() -> None:
    code, _, err = ended("--ready", "0", "--gone-after", "3")
    assert code == 10
    assert "error: the container is gone: c1" in err


def test_an_engine_that_fails_is_said() -> None:
    code, _, err = ended("--ready", "0", "--break-after", "3")
    assert code == 10
    assert "error: Docker returned an unexpected error" in err
    assert "the disk of the engine is full" in err


def test_no_engine_at_all_is_said() -> None:
    with begin("tcp://127.0.0.1:1") as program:
        _, err = program.communicate(timeout=90)
    assert program.returncode == 10
    assert re.search("error: Docker is (stopped|missing): nothing answers at tcp://127.0.0.1:1", err)
    assert "Traceback" not in err


def test_an_engine_that_vanishes_is_said() -> None:
    with ExitStack() as stack:
        with engine("--ready", "0") as address:
            program = stack.enter_context(begin(address))
            wait_for_words(program, "loading the model")
        _, err = program.communicate(timeout=90)
    assert program.returncode == 10
    assert re.search("error: Docker (is stopped|is missing|returned an unexpected error)", err)
    assert "Traceback" not in err


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    with engine("--ready", "0") as address, begin(address) as program:
        wait_for_words(program, "loading the model")
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=90)
    assert program.returncode == 130
    assert "Traceback" not in err


EVENT = '{"time": "2026-11-22T19:56:46.1+00:00", "level": "info", "message": "asking again in 8 s"}'
LOG = (EVENT, "  | of the engine", "error: download failed: m.gguf", "", "hint: check the network")
FAILED = ("--ready", "0", "--end-after", "1", *(word for line in LOG for word in ("--log", line)))


def test_the_first_failure_is_the_end_in_the_containers_own_words_and_it_is_not_started_again() -> None:
    with engine_told(*FAILED) as (address, told), begin(address) as program:
        out, err = program.communicate(timeout=90)
        assert told() == ["no"]
    assert (program.returncode, out) == (30, "")
    assert err.endswith(
        "  | 19:56:46 asking again in 8 s\n  | of the engine\n"
        "error: the container ended with code 30: download failed: m.gguf\n\nhint: check the network\n"
    )
    assert "{" not in err


def test_one_that_ended_before_it_was_looked_at_is_told_as_that() -> None:
    code, _, err = ended("--state", "exited", "--ports", "absent", "--log", "error: volume is read-only: /data")
    assert code == 30
    assert "error: the container ended with code 30: volume is read-only: /data" in err


def test_what_serves_is_started_again_after_a_crash() -> None:
    with engine_told() as (address, told), begin(address) as program:
        program.communicate(timeout=90)
        assert told() == ["no", "on-failure"]


def test_ctrl_c_leaves_it_with_its_restarts() -> None:
    with engine_told("--ready", "0") as (address, told), begin(address) as program:
        wait_for_words(program, "loading the model")
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=90)
        assert told() == ["no", "on-failure"]


def wait_for_words(program: subprocess.Popen[str], words: str) -> None:
    assert program.stderr
    for line in program.stderr:
        if words in line:
            return
    pytest.fail(f"it never said: {words}")
