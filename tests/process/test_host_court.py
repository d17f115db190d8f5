"""The court of `appliance upgrade` against a Docker daemon with knobs: as fast, slower, disturbed."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

from tests.process.stages.daemon import IMAGE, Host, on_host

NEXT = "appliance:next"
IMAGES = ("--image", IMAGE, "--image", NEXT)
UPGRADE = ("upgrade", "one", "--image", NEXT, "--court-s", "90")


def images_of(host: Host) -> list[tuple[str, str]]:
    """Return name and image of every appliance, which must be one that serves and perhaps one that is kept."""
    return [(row["name"], row["image"]) for row in json.loads(host.run("list", "--json").out)]


def most_running(host: Host) -> int:
    """Return how many containers ran at the same time at most, by what the daemon was asked."""
    running: set[str] = set()
    most = 0
    for row in host.rows():
        words = row["path"].split("/")
        if words[0] == "containers" and words[-1] == "start":
            running.add(words[1])
        elif words[0] == "containers" and (words[-1] == "stop" or row["method"] == "DELETE"):
            running.discard(words[1])
        most = max(most, len(running))
    return most


def test_a_new_image_that_is_as_good_is_taken() -> None:
    with on_host(*IMAGES) as host:
        port = host.serving()
        done = host.run(*UPGRADE, "--json")
        assert done.code == 0, done.err
        after = json.loads(host.run("status", "one", "--json").out)
        images = images_of(host)
    court = json.loads(done.out)["court"]
    assert (court["verdict"], court["old_image"], court["new_image"]) == ("as good", IMAGE, NEXT)
    assert court["finding"]["together"]
    assert court["verdicts"] == {"speeds": "as good", "memory": "as good", "answers": "as good", "rows": "not decided"}
    assert (after["image"], after["endpoint"]) == (NEXT, f"http://127.0.0.1:{port}/v1")
    assert sorted(images) == [("one", NEXT), ("one-before", IMAGE)]


def test_a_slower_image_is_refused_and_the_old_one_serves_on() -> None:
    with on_host(*IMAGES, "--slow-image", NEXT) as host:
        host.serving()
        starts = len(host.told("start"))
        done = host.run(*UPGRADE)
        again = host.run("status", "one", "--json")
        assert images_of(host) == [("one", IMAGE)]
        assert len(host.told("start")) == starts + 1  # the old one was never stopped
    assert done.code == 61, done.err
    assert "error: the comparison of both images lost: one keeps appliance:llama-cpu" in done.err
    rows = {line.split()[0]: line for line in done.out.splitlines()}
    assert rows["decode"].endswith("  lost")
    assert rows["answers"].endswith("  as good")
    assert json.loads(again.out)["phase"] == "ready"


def test_a_disturbed_comparison_decides_nothing() -> None:
    with on_host(*IMAGES, "--cpu-time", "unknown") as host:
        host.serving()
        done = host.run("upgrade", "one", "--image", NEXT, "--court-s", "1", "--json")
        assert images_of(host) == [("one", IMAGE)]
    assert done.code == 61, done.err
    document = json.loads(done.out)
    assert (document["upgraded"], document["court"]["verdict"]) == (None, "not decided")
    assert document["court"]["why"].endswith("Docker tells no CPU time")
    assert "hint: run it again when the machine is quiet" in done.err


def test_without_room_for_both_one_is_loaded_at_a_time() -> None:
    with on_host(*IMAGES, "--held-mib", "1e9", "--slow-image", NEXT) as host:
        port = host.serving()
        done = host.run(*UPGRADE, "--no-measure")
        after = json.loads(host.run("status", "one", "--json").out)
        most = most_running(host)
        assert images_of(host) == [("one", IMAGE)]
    assert done.code == 61, done.err
    assert "both images take turns: 3 engines of 1,000,000,056 MiB do not fit into" in done.err
    assert "one is started again as before" in done.err
    assert (after["phase"], after["endpoint"]) == ("ready", f"http://127.0.0.1:{port}/v1")
    assert most == 1


def test_ctrl_c_in_court_leaves_the_old_image_serving() -> None:
    with on_host(*IMAGES) as host:
        host.serving()
        with host.begin(*UPGRADE) as program:
            deadline = time.monotonic() + 90
            while not host.told("stats"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            program.send_signal(signal.SIGINT)
            _, err = program.communicate(timeout=90)
        after: dict[str, Any] = json.loads(host.run("status", "one", "--json").out)
        assert images_of(host) == [("one", IMAGE)]
    assert program.returncode == 130, err
    assert "Traceback" not in err
    assert (after["image"], after["phase"]) == (IMAGE, "ready")


@pytest.mark.parametrize("text", ["-1", "nan", "soon", "4000"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with on_host(daemon=False) as host:
        done = host.run("upgrade", "--court-s", text)
    assert done.code == 2
    assert f"not a number of seconds from 0 to 3600: {text}" in done.err
