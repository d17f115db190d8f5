from __future__ import annotations

import subprocess
import sys

import pytest

from appliance.console.progress import DOING, Phase, Progress
from appliance.gateway.wire import api_error


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_words(phase: Phase) -> None:
    assert DOING[phase] in Progress(phase=phase).sentence()
    assert Progress(phase=phase).is_ready == (phase is Phase.READY)


def test_what_is_done_to_what() -> None:
    progress = Progress(phase=Phase.LOADING, message="demo.gguf")
    assert progress.sentence() == "the model is being loaded: demo.gguf"


def test_the_time_in_a_phase_is_never_negative() -> None:
    assert Progress(phase=Phase.LOADING, since=float(2**40)).document()["elapsed_s"] == 0.0


def test_retrying_is_suggested_only_where_it_helps() -> None:
    waits = {phase: dict(api_error.not_ready(Progress(phase=phase)).headers).get(b"retry-after") for phase in Phase}
    assert waits[Phase.LOADING] == b"2"
    assert waits[Phase.TUNING] == b"10"
    assert waits[Phase.FAILED] is None
    assert waits[Phase.STOPPING] is None


@pytest.mark.parametrize(("left", "told"), [(None, b"10"), (0.2, b"2"), (42.4, b"43"), (90_000.0, b"600")])
def test_while_weights_are_fetched_a_client_is_told_when_to_come_back(left: float | None, told: bytes) -> None:
    progress = Progress(phase=Phase.FETCHING, facts={"file": "m.gguf", "seconds_left": left})
    assert dict(api_error.not_ready(progress).headers)[b"retry-after"] == told
    assert progress.document()["file"] == "m.gguf"


def test_an_event_in_the_words_of_either_sdk() -> None:
    error = api_error.shutting_down()
    message = b'"message":"the appliance is stopping",'
    openai = b'{"error":{' + message + b'"type":"service_unavailable","param":null,"code":"shutting_down"}}'
    assert error.event("openai") == b"data: " + openai + b"\n\n"
    anthropic = b'{"type":"error","error":{"type":"overloaded_error",' + message + b'"code":"shutting_down"}}'
    assert error.event("anthropic") == b"event: error\ndata: " + anthropic + b"\n\n"


def test_progress_can_be_kept_before_anything_heavy_is_imported() -> None:
    program = (
        "import sys, appliance.console.progress; print(*({'fastapi','uvicorn','aiohttp','asyncio'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""
