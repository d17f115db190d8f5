"""Two appliances on one machine that serve one model together, each with a faked vLLM: joining, losses, refusals."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.image_facts import dump_facts, parse_image_facts
from tests.ports import free_port
from tests.process.stages.boot import Home, Serving, eventually
from tests.process.stages.gateway import read_until
from tests.process.stages.vllm import family
from tests.process.stages.vllm_home import VllmHome

ENDINGS = Path(__file__).parents[1] / "endings"
KEY = "sk-of-the-group-0123456789abcdef"


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[tuple[VllmHome, VllmHome]]:
    """Two hosts with one key."""
    near, far = made(tmp_path / "a"), made(tmp_path / "b")
    yield near, far
    near.free_segments()
    far.free_segments()


def made(folder: Path) -> VllmHome:
    home = VllmHome.make(folder)
    secret = home.data / "secrets/api_key"
    secret.parent.mkdir()
    secret.write_text(KEY)
    secret.chmod(0o600)
    return home


@contextmanager
def host(home: Home, rank: int, port: int, **settings: str) -> Iterator[Serving]:
    """Start one of two hosts. The leader, of rank 0, listens on `port`."""
    own = {"port": str(port)} if rank == 0 else {}
    given = {"nodes": "2", "node_rank": str(rank), "leader": f"127.0.0.1:{port}", **own, **settings}
    with home.serving(**given) as serving:
        yield serving


def group(leader: Serving) -> Any:
    return leader.document("group")


def tree_of(serving: Serving) -> list[int]:
    """The engine's processes, the first one first."""
    return max((family(pid) for pid in serving.engine_pids()), key=len)


def serves_again(leader: Serving, follower: Serving, *, restarts: int) -> None:
    eventually(lambda: leader.names().count("group_restarts") == restarts, what=lambda: leader.text)
    eventually(lambda: leader.names().count("ready") == restarts + 1, what=lambda: leader.text)
    eventually(lambda: follower.names().count("ready") == restarts + 1, what=lambda: follower.text)
    leader.wait_ready()
    follower.wait_ready()
    assert leader.chat()[0] == 200
    assert leader.document("status")["engine_restarts"] == restarts


def test_two_hosts_join_serve_and_start_anew_after_a_loss(homes: tuple[VllmHome, VllmHome]) -> None:
    near, far = homes
    port = free_port()
    with host(far, 1, port) as follower:
        follower.event("waiting_for_leader")
        assert follower.ask("GET", "/health/live")[0] == 200
        status, document = follower.ask("GET", "/health/ready")
        assert status == 503
        assert "waiting for the leader" in document["message"]
        with host(near, 0, port) as leader:
            join_and_lose(near, far, leader, follower)
    assert near.segments == []


def join_and_lose(near: VllmHome, far: VllmHome, leader: Serving, follower: Serving) -> None:
    leader.wait_ready()
    follower.wait_ready()
    assert leader.chat()[0] == 200
    status, refusal = follower.chat()
    assert (status, refusal["error"]["code"]) == (421, "asked_elsewhere")
    assert f"127.0.0.1:{leader.port}" in refusal["error"]["message"]
    assert leader.ask("POST", "/appliance/v1/group", {})[0] == 401
    assert leader.ask("POST", "/appliance/v1/group", {}, key=KEY)[0] == 400
    assert leader.ask("POST", "/appliance/v1/group", "x" * 2**20, key=KEY)[0] == 413
    leave_in_mid_body(leader.port)
    assert "not encrypted" in leader.event("open_traffic")["message"]
    assert "not encrypted" in follower.event("open_traffic")["message"]
    found = group(leader)
    assert (found["nodes"], found["is_ready"], found["missing"]) == (2, True, [])
    (first,), (second,) = near.started, far.started
    assert "--pipeline-parallel-size 2 --nnodes 2 --node-rank 0 --master-addr 127.0.0.1" in first
    assert words_of(second) == [*words_of(first, rank="1"), "--headless"]

    lost = tree_of(follower)
    with leader.stream(max_tokens=10**6) as connection:
        read_until(connection, b"word")
        os.kill(lost[-1], signal.SIGKILL)  # the worker
        read_until(connection, b"error")
    serves_again(leader, follower, restarts=1)
    said = leader.event("group_restarts")["message"]
    assert "host 1 (" in said
    assert "died unexpectedly (exit code: -9)" in said
    assert said.partition("anew: ")[2] in follower.text

    os.kill(tree_of(leader)[1], signal.SIGKILL)  # EngineCore
    serves_again(leader, follower, restarts=2)
    assert "the leader's engine" in leader.events[-1]["message"] or "the leader's engine" in leader.text
    assert "the leader's engine" in follower.text

    follower.terminate()
    assert "it was stopped" in leader.event("host_lost")["message"]
    eventually(lambda: group(leader)["missing"] == [1])
    eventually(lambda: leader.ask("GET", "/health/ready")[0] == 503)
    assert leader.ask("GET", "/health/live")[0] == 200
    assert "waiting for host 1 of 2" in eventually(lambda: waits(leader))
    leader.terminate()
    assert "ClientDisconnect" not in leader.text


def test_a_lost_leader_that_comes_back_finds_its_follower(homes: tuple[VllmHome, VllmHome]) -> None:
    """The leader's host is gone in mid-stream, without a word. Its follower, left alone, joins the next leader."""
    near, far = homes
    port = free_port()
    with host(far, 1, port) as follower:
        with host(near, 0, port) as leader:
            leader.wait_ready()
            follower.wait_ready()
            orphaned = tree_of(follower)
            with leader.stream(max_tokens=10**6) as connection:
                read_until(connection, b"word")
                for pid in (leader.process.pid, *tree_of(leader)):
                    os.kill(pid, signal.SIGKILL)
        with host(near, 0, port) as leader:
            leader.wait_ready()
            eventually(lambda: follower.names().count("ready") == 2, what=lambda: follower.text)
            assert leader.chat()[0] == 200
            assert not set(tree_of(follower)) & set(orphaned)


def leave_in_mid_body(port: int) -> None:
    """Leave in the middle of a request. A leader must bear that: its followers may be killed at any moment."""
    head = f"POST /appliance/v1/group HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"{head}{{".encode())


def waits(leader: Serving) -> str:
    """Return the leader's message if it says that it waits for a host, else an empty text."""
    _, document = leader.ask("GET", "/health/ready")
    said = str(document["message"])
    return said if "waiting for host" in said else ""


def words_of(line: str, *, rank: str | None = None) -> list[str]:
    """Return the engine's options on a command line, with `--headless` last. If `rank` is given, it replaces the line's
    own."""
    words = line.split()[4:]
    if rank is not None:
        words[words.index("--node-rank") + 1] = rank
    return sorted(words, key="--headless".__eq__)


def test_who_does_not_belong_to_a_group_is_refused_and_it_goes_on(
    homes: tuple[VllmHome, VllmHome], tmp_path: Path
) -> None:
    near, far = homes
    port = free_port()
    with host(near, 0, port) as leader:
        leader.event("listening")
        facts = far.folder / "facts/image_facts.json"
        ours = facts.read_text()
        facts.write_text(dump_facts(replace(parse_image_facts(ours), build_id="another")))
        with host(far, 1, port) as other:
            assert other.wait_exit() == 10
            assert "its image is build another" in other.text
            assert "same image" in other.text
        assert "build another" in leader.event("host_refused")["message"]
        facts.write_text(ours)
        with host(far, 1, port) as follower:
            leader.wait_ready()
            with host(made(tmp_path / "c"), 1, port) as twice:
                assert twice.wait_exit() == 10
                assert "node rank twice: 1" in twice.text
            secret = made(tmp_path / "d")
            (secret.data / "secrets/api_key").write_text("sk-another-0123456789abcdef")
            with host(secret, 1, port) as stranger:
                assert stranger.wait_exit() == 10
                assert "one API key" in stranger.text
            assert leader.chat()[0] == 200
            assert leader.names().count("ready") == 1
            leader.terminate()
            with host(near, 0, port) as another:  # it is restarted: the follower, which never ended, joins it
                another.wait_ready()
                eventually(lambda: follower.names().count("ready") == 2, what=lambda: follower.text)
                assert another.chat()[0] == 200
                another.terminate()
            follower.terminate()


def test_what_fails_on_one_host_before_all_were_ready_ends_both_with_its_cause(
    homes: tuple[VllmHome, VllmHome],
) -> None:
    near, far = homes
    far.set_engine("--fake-end-at", "weights", "--fake-replay", str(ENDINGS / "vllm-no-weights.log"))
    port = free_port()
    with host(near, 0, port) as leader, host(far, 1, port) as follower:
        assert follower.wait_exit() == 30
        assert leader.wait_exit() == 43
        assert "the group did not become ready: host 1 (" in leader.text
        assert "Cannot find any model weights" in leader.text


@pytest.mark.parametrize("where", [0, 1], ids=["leader", "follower"])
def test_a_start_that_fails_after_a_loss_is_a_loss_more(homes: tuple[VllmHome, VllmHome], where: int) -> None:
    near, far = homes
    port = free_port()
    with host(near, 0, port) as leader, host(far, 1, port) as follower:
        leader.wait_ready()
        follower.wait_ready()
        homes[where].set_engine("--fake-end-at", "weights", "--fake-replay", str(ENDINGS / "vllm-no-weights.log"))
        os.kill(tree_of(follower)[-1], signal.SIGKILL)
        eventually(lambda: leader.names().count("group_restarts") == 2, what=lambda: leader.text)
        homes[where].set_engine()
        eventually(lambda: leader.names().count("ready") == 2, what=lambda: leader.text)
        eventually(lambda: follower.names().count("ready") == 2, what=lambda: follower.text)
        leader.wait_ready()
        assert leader.chat()[0] == 200
        assert "Cannot find any model weights" in leader.text


def test_a_leader_short_of_memory_has_all_start_with_less(homes: tuple[VllmHome, VllmHome]) -> None:
    near, far = homes
    log = ENDINGS / "vllm-kv-too-small.log"
    knobs = ("--fake-end-at", "profile", "--fake-replay", str(log), "--fake-core-first-s", "1")
    near.set_engine(*knobs, where="--max-model-len 8192 ")
    far.set_engine("--fake-end-with-leader")  # and so it is the first to tell of an end
    port = free_port()
    with host(near, 0, port) as leader, host(far, 1, port) as follower:
        leader.wait_ready()
        follower.wait_ready()
        stepped = leader.event("stepped_down")
        assert leader.document("status")["context"] == stepped["context"] < stepped["context_before"] == 8192
        assert f"--max-model-len {stepped['context']} " in far.started[-1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"node_rank": "2", "leader": "127.0.0.1"}, "node_rank is outside 0 to 1: '2' (variable APPLIANCE_NODE_RANK)"),
        ({"node_rank": "1"}, "setting leader is missing"),
        ({"nodes": "65"}, "setting nodes is outside 1 to 64: '65' (variable APPLIANCE_NODES)"),
        (
            {"node_rank": "1", "leader": "no-such-host.invalid", "stall_timeout_s": "1"},
            "cannot be resolved: 'no-such-host.invalid'",
        ),
        ({"node_rank": "0", "leader": "192.0.2.1"}, "names no address of this host: 192.0.2.1"),
    ],
    ids=["rank", "no-leader", "too-many", "unresolved", "not-ours"],
)
def test_a_place_that_cannot_be_ends_the_start(settings: dict[str, str], words: str, tmp_path: Path) -> None:
    with made(tmp_path / "a").serving(**{"nodes": "2", **settings}) as serving:
        assert serving.wait_exit() == 10
        assert words in serving.text


def test_a_model_of_one_host_s_engine_is_served_by_replicas(tmp_path: Path) -> None:
    with Home.make(tmp_path / "a").serving(nodes="2", leader="127.0.0.1") as serving:
        assert serving.wait_exit() == 10
        assert "replica" in serving.text
