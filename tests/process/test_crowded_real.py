"""Requests that do not fit into the context together, on the real engine: each is answered, or told why it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.process.stages.boot import Serving
from tests.process.stages.gateway import read_until
from tests.process.stages.real import real_home
from tests.shapes import SMALL, write_gguf

CONTEXT, TOKENS = 512, 300
PATIENCE_S = 600
ROUNDS = 50  # one must meet: on a fast machine the first request may end before the second comes
FULL = b'"code":"context_full"'


def asked(number: int, **more: Any) -> dict[str, Any]:
    """Return a request that takes more than half of the context, most of it generated. `number` gives each a prefix of
    its own."""
    text = f"{number} is a number. " + "Count on. " * 5
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}


def round_of_two(serving: Serving, number: int) -> bool:
    """Run a stream and, once it has begun, another request. True if the stream ended because the context was full."""
    with serving.stream(**asked(number)) as stream:
        stream.settimeout(PATIENCE_S)
        begun = read_until(stream, b"data: ")
        body = asked(number + ROUNDS)
        status, answer = serving.ask("POST", "/v1/chat/completions", body, key=serving.home.key, timeout_s=PATIENCE_S)
        received = read_until(stream, b"0\r\n\r\n", begun)
    assert (status, answer["usage"]["completion_tokens"]) == (200, TOKENS), answer
    has_met = FULL in received
    assert has_met or b"[DONE]" in received
    return has_met


def test_one_that_has_not_begun_is_answered_after_all(tmp_path: Path) -> None:
    home = real_home(tmp_path / "home")
    write_gguf(home.data / "models/model.gguf", SMALL["gqa"], quantization="Q8_0", with_data=True)
    with home.serving(parallel="4", ctx_size=str(CONTEXT), threads="1") as serving:
        serving.wait_ready()
        assert any(round_of_two(serving, number) for number in range(ROUNDS))
        assert serving.terminate() < 10
