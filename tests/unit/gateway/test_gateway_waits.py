"""What an engine owes, on a clock that the test turns."""

from __future__ import annotations

import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from appliance.gateway.engine.upstream import HungError, Response
from appliance.gateway.engine.waits import Waits
from appliance.gateway.wire.events import has_content


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stage:
    def __init__(self) -> None:
        self.clock = Clock()
        self.waits = Waits(self.clock)

    def turn(self, seconds: float, *, counted_s: float | None = None) -> float:
        self.clock.now += seconds
        self.waits.pass_time(seconds if counted_s is None else counted_s)
        return self.waits.silent_s

    def response(self) -> Response:
        return Response("POST", self.clock)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def answer(response: Response, body: bytes, *, status: bytes = b"200 OK") -> None:
    response.data_received(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(body)))
    response.data_received(body)


def begin(response: Response) -> None:
    response.data_received(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")


def test_a_silence_lasts_since_any_of_them_got_something(stage: Stage) -> None:
    first, second = stage.response(), stage.response()
    with stage.waits.waiting(first, 10), stage.waits.waiting(second, 20):
        assert stage.turn(5.0) == 5.0
        begin(first)
        assert stage.turn(1.0) == 6.0  # a head alone is no answer
        first.data_received(b"data: word\n\n")
        assert stage.turn(2.0) == 2.0
        assert stage.waits.requests == 2
        assert stage.waits.largest(1) == [20]


def test_a_request_has_waited_no_longer_than_it_is_there(stage: Stage) -> None:
    stage.clock.now += 100.0
    with stage.waits.waiting(stage.response(), 1):
        stage.clock.now += 0.5
        stage.waits.pass_time(2.0)
        assert stage.waits.silent_s == 0.5


def test_time_in_which_we_stood_still_does_not_count(stage: Stage) -> None:
    with stage.waits.waiting(stage.response(), 1):
        assert stage.turn(3600.0, counted_s=4.0) == 4.0
        assert stage.turn(1.0) == 5.0


def test_clients_that_leave_with_nothing_add_up_until_one_is_answered(stage: Stage) -> None:
    for waited in (10.0, 20.0, 30.0):
        with stage.waits.waiting(stage.response(), 1):
            assert stage.turn(10.0) == waited
        assert (stage.waits.requests, stage.turn(100.0)) == (0, waited)
    refused = stage.response()
    with stage.waits.waiting(refused, 1, needs_model=False):
        answer(refused, b"no", status=b"400 Bad Request")
        assert stage.turn(1.0) == 30.0
    assert stage.waits.silent_s == 0.0


@pytest.mark.parametrize("status", [b"400 Bad Request", b"500 Internal Server Error"])
def test_what_is_refused_or_needs_no_model_is_nothing_for_those_who_wait(stage: Stage, status: bytes) -> None:
    with stage.waits.waiting(stage.response(), 1):
        for needs_model, code in ((True, status), (False, b"200 OK")):
            other = stage.response()
            with stage.waits.waiting(other, 1, needs_model=needs_model):
                stage.turn(5.0)
                answer(other, b"{}", status=code)
        assert stage.turn(5.0) == 15.0


async def test_one_that_is_answered_in_part_and_whose_client_does_not_read_is_not_owed(stage: Stage) -> None:
    response = stage.response()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as engine:
        engine.bind(f"{folder}/engine")
        engine.listen()
        response.connect(Path(folder, "engine"))
        with stage.waits.waiting(response, 1):
            begin(response)
            response.data_received(b"x" * 300 * 2**10)
            assert (stage.waits.requests, stage.turn(60.0)) == (0, 0.0)
        response.close()


def test_a_new_engine_owes_nothing(stage: Stage) -> None:
    with stage.waits.waiting(stage.response(), 1):
        stage.turn(50.0)
    with stage.waits.waiting(stage.response(), 1):
        stage.turn(50.0)
        stage.waits.begin()
        assert stage.turn(1.0) == 1.0


async def test_those_who_wait_are_told_why_after_what_has_come(stage: Stage) -> None:
    with ExitStack() as stack:
        responses = [stage.response() for _ in range(3)]
        for response in responses:
            stack.enter_context(stage.waits.waiting(response, 1))
        begin(responses[0])
        responses[0].data_received(b"data: word\n\n")
        answer(responses[1], b"whole")
        stage.waits.give_up("it sleeps")
        chunks = responses[0].chunks()
        assert await anext(chunks) == b"data: word\n\n"
        with pytest.raises(HungError, match="it sleeps"):
            await anext(chunks)
        assert await responses[1].read() == b"whole"
        with pytest.raises(HungError):
            await responses[2].until_head()


@pytest.mark.parametrize(
    ("chunk", "is_content"),
    [
        (b": ping\n\n", False),
        (b": a\n\n: b\n\n", False),
        (b": a\n\ndata: {}\n\n", True),
        (b'event: response.created\ndata: {"a": 1}\n\n', False),
        (b"event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n", False),
        (b"event: response.in_progress\r\ndata: {}\r\n\r\n", False),
        (b"event: response.created\ndata: {}\n\nevent: response.output_text.delta\ndata: {}\n\n", True),
        (b"event: response.output_text.delta\ndata: {}\n\n", True),
        (b"data: {}\n\n", True),
        (b'{"a": 1}', True),
    ],
)
def test_what_is_said_before_there_is_an_answer_is_none(chunk: bytes, is_content: bool) -> None:
    assert has_content(chunk) is is_content
