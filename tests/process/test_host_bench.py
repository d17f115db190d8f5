"""`bench` against an endpoint of set pace: its figures are that pace, and whatever goes wrong is said in words."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.signals import hear_all

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/fakes/fake_openai.py"
SHORT = ("--prompts", "256", "--concurrency", "1", "--tokens", "8", "--requests", "2")


@contextmanager
def endpoint(*knobs: str) -> Iterator[str]:
    with subprocess.Popen([sys.executable, str(FAKE), *knobs], stdout=subprocess.PIPE, text=True) as fake:
        try:
            assert fake.stdout
            yield f"http://127.0.0.1:{fake.stdout.readline().strip()}/v1"
        finally:
            fake.kill()


@contextmanager
def begin(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "appliance.host.bench", *words]
    inherited = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, cwd=ROOT, env=inherited | variables, text=True, stdout=pipe, stderr=pipe, preexec_fn=hear_all
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def ended(*words: str, **variables: str) -> tuple[int, str, str]:
    with begin(*words, **variables) as program:
        out, err = program.communicate(timeout=180)
    assert "Traceback" not in err, err
    return program.returncode, out, err


def bench(url: str, *words: str) -> dict[str, Any]:
    code, out, err = ended(url, "--json", *words)
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def asked(url: str) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://").removesuffix("/v1"))
    connection.request("GET", "/fake/requests")
    found: list[dict[str, Any]] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def test_the_figures_are_the_pace_that_was_set() -> None:
    """TTFT 1024 tokens / 2,000 + 200 ms; decode one token each 50 ms. A busy machine delays single tokens: how close it
    is on a quiet one is for benchmarks/bench_against_aiperf.py to say."""
    with endpoint("--prefill", "2000", "--ttft-ms", "200", "--inter-token-ms", "50") as url:
        found = bench(url, "--prompts", "1K", "--concurrency", "2", "--tokens", "17")
    assert found["model"] == "fake"
    assert [(row["prompt"], row["concurrency"], row["answered"]) for row in found["rows"]] == [
        (1024, 1, 3),
        (1024, 2, 6),
    ]
    for row in found["rows"]:
        ttft_ms = 200 + row["prompt_tokens"] / 2.0
        assert row["prompt_tokens"] == pytest.approx(1024, rel=0.02)
        assert row["completion_tokens"] == 17
        assert 0.99 * ttft_ms <= row["ttft_ms"]["p50"] <= 10 * ttft_ms
        assert row["prefill_tokens_per_s"]["p50"] == pytest.approx(
            row["prompt_tokens"] / row["ttft_ms"]["p50"] * 1000, rel=0.05
        )
        assert 2 <= row["decode_tokens_per_s"]["p50"] <= 200
        assert 5 <= row["inter_token_ms"]["mean"] <= 500
        assert row["failures"] == {}
        # All at once are never faster than the pace of each.
        assert 0 < row["throughput_tokens_per_s"] <= 1.05 * row["concurrency"] * 17 / (ttft_ms / 1000 + 16 * 0.05)


def test_the_request_after_a_start_is_thrown_away() -> None:
    with endpoint("--first-slow-ms", "6000") as url:
        found = bench(url, *SHORT)
    assert found["rows"][0]["ttft_ms"]["p99"] < 6000


def test_no_two_prompts_share_a_beginning_and_a_seed_makes_them_again() -> None:
    words = ("--prompts", "256,512", "--concurrency", "2", "--tokens", "4", "--requests", "2", "--seed", "5")
    with endpoint() as url:
        bench(url, *words)
        first = [body["messages"][0]["content"] for body in asked(url)]
        bench(url, *words)
        both = [body["messages"][0]["content"] for body in asked(url)]
    assert len(first) == 2 + 2 * (2 + 4)
    assert len({prompt[:8] for prompt in first}) == len(first)
    assert sorted(both) == sorted(first * 2)


def test_waiting_for_a_slot_is_part_of_ttft() -> None:
    with endpoint("--slots", "1", "--inter-token-ms", "20") as url:
        found = bench(url, "--prompts", "256", "--concurrency", "1,2", "--tokens", "10", "--requests", "2")
    _, both = found["rows"]
    assert both["ttft_ms"]["p95"] > 100  # most of the 180 ms that the other one's tokens take


def test_a_table_is_for_people() -> None:
    with endpoint("--stop-after", "5", "--tokens-per-chunk", "2", "--cached-share", "0.5") as url:
        code, out, err = ended(url, *SHORT)
    assert code == 0, err
    assert "fake at http://127.0.0.1" in out
    assert "prefill" in out
    assert "prompt cache: up to 50% of the prompt tokens were not computed" in out
    assert "answers of 5 of 8 tokens: the model ended early" in out
    assert "chunks of up to 1.7 tokens" in out
    assert "1 of 1 rows" in err


@pytest.mark.parametrize("knobs", [("--strict",), ("--strict", "--new-style"), ("--field", "reasoning_content")])
def test_servers_that_want_it_otherwise_are_asked_so(knobs: tuple[str, ...]) -> None:
    with endpoint(*knobs) as url:
        row = bench(url, *SHORT)["rows"][0]
        bodies = asked(url)
    assert (row["answered"], row["failures"], row["completion_tokens"]) == (2, {}, 8)
    assert ("ignore_eos" in bodies[-1]) == (knobs[0] != "--strict")
    assert ("max_completion_tokens" in bodies[-1]) == ("--new-style" in knobs)


def test_a_prompt_that_does_not_fit_is_skipped_and_said() -> None:
    with endpoint("--context", "1000") as url:
        code, out, err = ended(url, "--prompts", "512,2K", "--concurrency", "2", "--tokens", "8", "--requests", "1")
        assert code == 0, err
        assert "skipped: 2,048 tokens do not fit: maximum context length is 1000 tokens" in out
        long = [body for body in asked(url) if len(body["messages"][0]["content"]) > 8000]
        assert len(long) == 1, "the same length is not asked for again at a higher concurrency"


def test_a_server_that_cuts_prompts_in_silence_is_found_out() -> None:
    with endpoint("--cut-prompts-to", "600") as url:
        code, out, _ = ended(url, "--prompts", "512,2K", "--concurrency", "1", "--tokens", "8", "--requests", "1")
    assert code == 0
    assert "skipped: 2,048 tokens do not fit: the server read only 600 of about 2,048 tokens" in out


def test_a_context_that_no_prompt_fits_ends_with_43() -> None:
    with endpoint("--context", "600") as url:
        code, _, err = ended(url, "--prompts", "4K", "--tokens", "8")
    assert code == 43
    assert "no prompt fits the endpoint's context" in err


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("reset", "the connection broke in mid-answer"),
        ("end", "cut after 2 chunks"),
        ("error", "the server ended the stream: engine died"),
        ("json", "an event is not a JSON"),
        ("stall", "no data within the timeout"),
    ],
)
def test_answers_that_are_cut_are_counted_with_their_reason(how: str, reason: str) -> None:
    with endpoint("--bad", how, "--bad-every", "2") as url:
        timeout_s = "5" if how == "stall" else "60"
        code, out, err = ended(url, *SHORT, "--requests", "4", "--timeout-s", timeout_s, "--json")
    assert code == 0, err
    row = json.loads(out)["rows"][0]
    assert (row["answered"], sum(row["failures"].values())) == (2, 2)
    assert any(reason in each for each in row["failures"])
    assert f"failed: 2 requests: {reason}" in err


def test_it_ends_after_a_row_without_an_answer() -> None:
    with endpoint("--busy-after", "4") as url:
        code, out, err = ended(url, "--prompts", "256,512", "--concurrency", "1", "--tokens", "4", "--requests", "2")
        assert code == 43
        assert "every request failed at 512 tokens and 1 at once: HTTP 503: the model is being loaded" in err
        assert "256" in out, "what was measured before is shown"


def test_without_token_counts_there_is_nothing_to_measure_with() -> None:
    with endpoint("--no-usage") as url:
        code, _, err = ended(url, *SHORT)
    assert code == 43
    assert "no token counts: the stream has no usage" in err


def test_a_key_that_is_refused_says_where_it_was_from(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-right\n")
    (tmp_path / "wrong").write_text("sk-wrong\n")
    (tmp_path / "empty").write_text("")
    with endpoint("--key", "sk-right") as url:
        for words, variables, said in (
            ((), {}, "key: none was given"),
            (("--key-file", f"{tmp_path}/wrong"), {}, f"key: from {tmp_path}/wrong"),
            ((), {"OPENAI_API_KEY": "sk-wrong"}, "key: from the variable OPENAI_API_KEY"),
            (("--key-file", f"{tmp_path}/empty"), {}, f"the key file {tmp_path}/empty is empty"),
        ):
            code, _, err = ended(url, *SHORT, *words, **variables)
            assert code == 10
            assert said in err
            assert "sk-wrong" not in err
        assert ended(url, *SHORT, "--key-file", f"{tmp_path}/key")[0] == 0


def test_a_key_is_needed_by_chats_alone_on_some_servers() -> None:
    """The list of models needs no key there, so that the first chat is refused."""
    with endpoint("--key", "sk-right", "--no-models") as url:
        code, _, err = ended(url, *SHORT, "--model", "fake")
    assert code == 10
    assert "refuses the key" in err


def test_without_docker_it_says_what_to_do() -> None:
    code, _, err = ended(*SHORT, DOCKER_HOST="tcp://127.0.0.1:1")
    assert code == 10
    assert "nothing answers at tcp://127.0.0.1:1" in err


def test_nothing_that_listens_ends_with_10() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        code, _, err = ended(url, *SHORT)
    assert code == 10
    assert f"no answer from {url}/v1: ConnectionRefusedError" in err


@pytest.mark.parametrize(
    ("knobs", "code", "said"),
    [
        (("--model", "a,b"), 10, "serves several models: a, b"),
        (("--no-models",), 10, "lists no models"),
        (("--models-body", "<html>"), 10, "not an OpenAI endpoint"),
    ],
)
def test_a_model_that_is_not_clear_is_asked_for(knobs: tuple[str, ...], code: int, said: str) -> None:
    with endpoint(*knobs) as url:
        assert (found := ended(url, *SHORT))[0] == code
    assert said in found[2]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("localhost:1",), 2, "not the URL of an endpoint: localhost:1"),
        (("http://127.0.0.1:1", "--prompts", "1x"), 2, "not a prompt length"),
        (("http://127.0.0.1:1", "--concurrency", "0"), 2, "not a number of parallel requests"),
        (("http://127.0.0.1:1", "--tokens", "1"), 2, "not a whole number from 2"),
        (("http://127.0.0.1:1", "--plot", "p.txt"), 2, "unknown picture format: .txt"),
        (("http://127.0.0.1:1", "--plot", "/nowhere/p.png"), 10, "no such folder: /nowhere"),
    ],
)
def test_what_cannot_be_is_refused_before_a_minute_is_spent(words: tuple[str, ...], code: int, said: str) -> None:
    found = ended(*words)
    assert found[0] == code
    assert said in found[2]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_it_draws(tmp_path: Path, kind: str) -> None:
    picture = tmp_path / f"p.{kind}"
    with endpoint() as url:
        code, _, err = ended(url, *SHORT, "--plot", str(picture))
    assert code == 0, err
    assert picture.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[kind])


def test_without_matplotlib_it_says_so_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    code, _, err = ended("http://127.0.0.1:1", "--plot", str(tmp_path / "p.png"), PYTHONPATH=str(tmp_path))
    assert code == 10
    assert "pip install matplotlib" in err


def test_ctrl_c_shows_what_was_measured() -> None:
    bad = ("--bad", "stall", "--bad-after", "3", "--bad-every", "1")  # the second row never ends
    with endpoint(*bad) as url, begin(
        url, "--prompts", "256,512", "--concurrency", "1", "--tokens", "4", "--requests", "1", "--json"
    ) as program:  # fmt: skip
        assert program.stderr
        assert program.stderr.readline() == "1 of 2 rows\n"
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=90)
    assert program.returncode == 130, err
    assert [row["prompt"] for row in json.loads(out)["rows"]] == [256]


def test_no_answer_is_asked_for_greedily() -> None:
    """Greedy text of a small model falls into loops, which speculative decoding would get for free."""
    with endpoint() as url:
        bench(url, *SHORT)
        bodies = asked(url)
    assert {body["temperature"] for body in bodies} == {0.7}
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in bodies)
