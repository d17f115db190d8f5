"""A group of hosts as its leader sees it: who may join, who is lost, and what followers are told."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import pytest

from appliance.console.report import Report
from appliance.errors import ConfigError
from appliance.serve.hosts.address import address_towards, leader_of, own_address
from appliance.serve.hosts.follow import ANSWER_S, Follower, Silence
from appliance.serve.hosts.group import LOST_S, TICK_S, TOKENS_MAX, Group, RefusedError
from appliance.serve.hosts.member import FollowerStatus, LeaderReply, parse_member, parse_word, shortened
from appliance.settings import resolve_settings
from tests.golden.vllm_plans import hardware

LEADER = FollowerStatus(rank=0, nodes=3, token="leader", name="a", build="b1", cell="vllm-cu130", model="d1",
                gpus=hardware("2x4090").gpus.gpus)  # fmt: skip


def member(number: int, **changes: object) -> FollowerStatus:
    made = replace(LEADER, rank=number, token=f"t{number}", name=f"host-{number}")
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def group() -> Group:
    found = Group(3, Report("json", io.StringIO()))
    found.own = LEADER
    return found


def pass_time(group: Group, seconds: float) -> None:
    for _ in range(int(seconds / TICK_S)):
        group.tick(TICK_S)


async def test_a_round_begins_when_all_are_there_and_is_told_to_each_once(group: Group) -> None:
    assert group.heard(member(1)).plan is None
    assert group.missing == (2,)
    group.heard(member(2))
    assert group.missing == ()
    assert [host.name for host in group.hosts] == ["host-1", "host-2"]
    group.begin("10.0.0.1", 29501, {"context": 4096})
    word = group.heard(member(1))
    assert (word.plan, word.leader, word.port) == ({"context": 4096}, "10.0.0.1", 29501)
    running = group.heard(member(1, round=word.round))
    assert (running.plan, running.round, running.is_ready) == (None, word.round, False)
    group.set_ready()
    assert group.heard(member(1, round=word.round)).is_ready
    assert group.document()["missing"] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"build": "b2"}, "its image is build b2 (vllm-cu130), and the leader's b1"),
        ({"gpus": hardware("t4").gpus.gpus}, "of other chips: SM 75, and the leader's SM 89"),
        ({"gpus": ()}, "of other chips: no GPU"),
        ({"model": "d2"}, "other weights"),
        ({"nodes": 2}, "number of hosts is 2, and the leader's 3"),
        ({"rank": 3}, "its node rank is 3"),
        ({"rank": 0}, "its node rank is 0"),
    ],
)
def test_what_differs_is_refused_with_both_values(changes: dict[str, object], words: str, group: Group) -> None:
    with pytest.raises(RefusedError, match=r".") as caught:
        group.heard(member(1, **changes))
    assert words in str(caught.value)
    assert group.missing == (1, 2)


def test_before_the_leader_knows_its_own_model_nobody_is_judged() -> None:
    group = Group(2, Report("json", io.StringIO()))
    assert group.heard(member(1, build="b2")).message == "the leader is starting"


def test_of_two_with_one_rank_the_later_is_refused_once_the_first_is_heard_again(group: Group) -> None:
    group.heard(member(1))
    assert "which may be gone" in group.heard(member(1, token="other", name="host-x")).message
    group.heard(member(1))
    with pytest.raises(RefusedError, match="node rank twice: 1 is that of host-1"):
        group.heard(member(1, token="other", name="host-x"))


def test_a_host_that_came_back_takes_the_place_of_what_it_was(group: Group) -> None:
    group.heard(member(1))
    group.heard(member(1, token="again"))
    pass_time(group, LOST_S)
    group.heard(member(1, token="again"))
    assert group.missing == (2,)


async def begun(group: Group) -> str:
    for rank in (1, 2):
        group.heard(member(rank))
    group.begin("10.0.0.1", 29501, {})
    name = group.heard(member(1)).round
    for rank in (1, 2):
        group.heard(member(rank, round=name))
    return name


async def test_a_host_that_is_silent_is_lost_and_ends_the_round(group: Group) -> None:
    name = await begun(group)
    pass_time(group, LOST_S - TICK_S)
    group.heard(member(1, round=name))
    assert group.failure is None
    pass_time(group, TICK_S)
    failure = await group.wait_failed()
    assert failure.words == "host 2 (host-2) was lost: nothing was heard of it for 30 s"
    assert not failure.by_engine
    assert group.missing == (2,)


async def test_a_leader_that_stood_still_blames_nobody(group: Group) -> None:
    await begun(group)
    group.tick(10 * LOST_S)
    assert group.failure is None


async def test_a_host_that_leaves_is_lost_at_once(group: Group) -> None:
    name = await begun(group)
    group.heard(member(2, round=name, is_leaving=True))
    assert "host 2 (host-2) was lost: it was stopped" in (await group.wait_failed()).words


@pytest.mark.parametrize("changes", [{"ended": "engine was killed"}, {"round": ""}])
async def test_an_engine_that_ended_ends_the_round_and_nobody_joins_it_again(
    changes: dict[str, str], group: Group
) -> None:
    name = await begun(group)
    answer = group.heard(member(1, **{"round": name, **changes}))
    failure = await group.wait_failed()
    assert failure.by_engine
    assert changes.get("ended", "does not run its engine") in failure.words
    assert (answer.plan, answer.round) == (None, "")
    assert group.heard(member(1)).plan is None
    group.end(failure.words)
    assert group.missing == (2,)  # it has not stopped yet
    assert failure.words in group.heard(member(2, round=name)).message
    group.heard(member(2))
    assert group.missing == ()


async def test_a_follower_whose_engine_died_hears_whether_it_was_the_first(group: Group) -> None:
    name = await begun(group)
    said = {"round": name, "ended": "engine was killed"}
    assert group.heard(member(1, **said)).blames is None  # the leader looks at its own
    blaming = asyncio.ensure_future(group.blame(1))
    await asyncio.sleep(0)
    assert group.heard(member(1, **said)).blames == 1
    assert group.heard(member(2, **said)).blames == 1
    group.heard(member(1, **said, is_leaving=True))
    await asyncio.wait_for(blaming, 30)
    group.end("the leader's engine was killed")
    assert group.heard(member(2, **said)).blames == 0


async def test_what_was_ready_once_is_told_for_good(group: Group) -> None:
    name = await begun(group)
    assert not group.heard(member(1, round=name)).was_ready
    group.set_ready()
    group.end("host 2 was lost")
    assert group.heard(member(1)).was_ready


def test_silence_is_counted_by_the_clock_and_without_our_own_pauses() -> None:
    now = 0.0
    silent = Silence(LOST_S, lambda: now)
    turn_s = TICK_S + ANSWER_S  # of an answer that never comes
    for _ in range(4):
        now += turn_s
        silent.turn(is_heard=False)
    assert not silent.is_over
    silent.turn(is_heard=True)
    now += 10 * LOST_S
    for _ in range(5):
        assert not silent.is_over
        silent.turn(is_heard=False)
        now += turn_s
    assert silent.is_over


def test_documents_go_there_and_back(group: Group) -> None:
    sent = member(1, shm_mib=64)
    assert parse_member(json.dumps(asdict(sent)).encode()) == sent
    word = group.heard(sent)
    assert parse_word(json.dumps(asdict(word)).encode()) == word
    with pytest.raises(ValueError, match="rank"):
        parse_member(b"{}")


def changed_gpu(**changes: object) -> dict[str, object]:
    return {"gpus": (replace(LEADER.gpus[0], **changes),)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "\x1b[2J"},
        {"name": "a" * 254},
        {"name": "\ud800"},
        {"token": "t" * 65},
        {"token": ""},
        {"ended": "e" * 4097},
        {"ended": "\ud800"},
        {"rank": 10**25},
        {"shm_mib": -1},
        {"gpus": LEADER.gpus[:1] * 65},
        changed_gpu(vram_free_mib=-5),
        changed_gpu(vram_total_mib=10**30),
        changed_gpu(bandwidth_gb_s=float("nan")),
        changed_gpu(bandwidth_gb_s=float("inf")),
        changed_gpu(name="a\nb"),
        changed_gpu(nvlink_peers=(-1,)),
    ],
)
def test_what_no_host_says_is_no_document_of_one(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="FollowerStatus"):
        parse_member(json.dumps(asdict(member(1, **changes))).encode())


@pytest.mark.parametrize("words", ["é" * 5000, "\ud800", "died"])
def test_an_engine_s_last_words_are_cut_to_what_may_be_said(words: str) -> None:
    sent = member(1, ended=shortened(words))
    assert parse_member(json.dumps(asdict(sent)).encode()) == sent


def test_no_more_of_strangers_is_remembered_than_of_a_group() -> None:
    log = io.StringIO()
    group = Group(3, Report("json", log))
    group.own = LEADER
    group.heard(member(1))
    for number in range(TOKENS_MAX + 1):
        group.heard(member(1, token=f"twice{number}"))
        with pytest.raises(RefusedError):
            group.heard(member(2, token=f"other{number}", build="b2"))
    assert log.getvalue().count("host_refused") == TOKENS_MAX
    group.heard(member(1))
    with pytest.raises(RefusedError, match="node rank twice"):
        group.heard(member(1, token=f"twice{TOKENS_MAX - 1}"))
    assert "may be gone" in group.heard(member(1, token=f"twice{TOKENS_MAX}")).message


def test_the_leader_s_address_is_one_of_its_own() -> None:
    settings = resolve_settings({"leader": "node-0:8080", "nodes": "2"}, {})
    assert leader_of(settings) == ("node-0", 8080)
    assert leader_of(resolve_settings({"leader": "node-0"}, {})) == ("node-0", 11435)
    assert own_address(((socket.AF_INET, "192.0.2.1"), (socket.AF_INET, "127.0.0.1")), settings) == "127.0.0.1"
    assert address_towards(((socket.AF_INET, "127.0.0.1"),), settings) == "127.0.0.1"


@pytest.mark.parametrize("found", [["127.0.0.1", "0.0.0.0"], ["0.0.0.0", "127.0.0.1"]])
def test_the_leader_s_address_is_none_that_stands_for_all(found: list[str]) -> None:
    settings = resolve_settings({"leader": "node-0", "nodes": "2"}, {})
    assert own_address(tuple((socket.AF_INET, each) for each in found), settings) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"names no address of this host: 0.0.0.0, :: \(flag --leader\)"):
        own_address(((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")), settings)


def test_the_leader_s_address_is_one_that_others_reach_where_there_is_one() -> None:
    settings = resolve_settings({"leader": "node-0", "nodes": "2"}, {})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        try:
            made.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        ours = made.getsockname()[0]
    found = ((socket.AF_INET, "127.0.1.1"), (socket.AF_INET, ours))
    assert own_address(found, settings) == ours


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (
            400,
            b'{"error": {"message": "the report lacks round"}}',
            "refuses this host: 400: the report lacks round",
        ),
        (200, b'{"message": "of another release"}', "says cannot be read: LeaderReply lacks"),
        (409, b"", "refuses this host: 409"),
    ],
)
async def test_a_leader_of_another_release_ends_a_follower(status: int, body: bytes, words: str) -> None:
    async with answering(status, body) as port:
        with pytest.raises(ConfigError) as caught:
            await following(port)
    assert words in caught.value.message
    assert caught.value.hint
    assert "the same image" in caught.value.hint


async def test_engines_do_not_look_for_the_leader_on_their_own_host() -> None:
    word = LeaderReply(message="", round="r", blames=None, leader="127.0.1.1", port=1, plan={})
    follower = Follower(resolve_settings({"nodes": "2", "node_rank": "1", "leader": "node-0"}, {}))
    follower.check_leader(word, "127.0.0.1")
    with pytest.raises(ConfigError) as caught:
        follower.check_leader(word, "10.0.0.2")
    assert "the leader's name is loopback there: 127.0.1.1" in caught.value.message
    assert "give its address" in str(caught.value.hint)


@asynccontextmanager
async def answering(status: int, body: bytes) -> AsyncIterator[int]:
    """A leader that gives every request this answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def following(port: int) -> LeaderReply | None:
    settings = {"nodes": "2", "node_rank": "1", "leader": f"127.0.0.1:{port}", "auth": "off"}
    follower = Follower(resolve_settings(settings, {}))
    async with follower.session() as session:
        return await follower.tell(session, member(1))


def test_a_leader_without_a_route_is_refused() -> None:
    settings = resolve_settings({"leader": "[::ffff:0:0]", "nodes": "2"}, {})
    with pytest.raises(ConfigError) as caught:
        address_towards(((socket.AF_INET, "255.255.255.255"),), settings)  # without SO_BROADCAST nothing may go there
    assert "no route to: 255.255.255.255 (flag --leader)" in caught.value.message
