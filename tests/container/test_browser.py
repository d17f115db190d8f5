"""The pages in a real browser, before the real container: from a first start to a chat, and what must not happen."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.container.stages.containers import MODEL, ROOT, Stage, started, volume, wait_for
from tests.container.stages.three_models import three_in_memory_for_two
from tests.fakes.hub.running import REPO, running_hub
from tests.ports import free_port

HERE = Path(__file__).parent / "browser"
SCRIPT = ROOT / "images/builder/web_libraries.py"
PAGES_BYTES_MAX = 100_000
PACE = 2_000_000  # bytes per second of the fetch, until it was seen
# What the page asks for, by the name of the file that it makes.
SECOND = "cp -L /data/models/models--*/snapshots/*/*.gguf /data/models/second.gguf"
KILL = "kill -9 $(grep -l llama-server /proc/[0-9]*/comm | cut -d/ -f3)"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
# Set to a folder, the pictures are kept there: those in docs/pictures were made so.
PICTURES = os.environ.get("APPLIANCE_TEST_PICTURES")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the tag of the browser's image, built once for this machine's builder."""
    context = tmp_path_factory.mktemp("browser")
    for path in (HERE / "Dockerfile", HERE / "axe.json", SCRIPT):
        shutil.copy(path, context)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(context.iterdir()))).hexdigest()
    tag = f"appliance-test-browser:{digest[:12]}"
    certificates = next((os.environ[name] for name in ("PIP_CERT", "SSL_CERT_FILE") if os.environ.get(name)), None)
    secret = ["--secret", f"id=ca,src={certificates}"] if certificates else []
    argv = ["docker", "buildx", "build", "--provenance=false", "--load", "--tag", tag, *secret, str(context)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        pytest.skip(f"the browser's image cannot be built here: {done.stderr.strip().splitlines()[-1]}")
    return tag


@pytest.fixture(scope="module")
def seen(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return what one look at a first start saw: the dashboard is open from its first seconds, and the model comes from
    a slow hub."""
    folder = Path(PICTURES) if PICTURES else tmp_path_factory.mktemp("pictures")
    folder.chmod(0o777)
    place = tmp_path_factory.mktemp("hub") / "files" / REPO
    place.mkdir(parents=True)
    (place / MODEL.name).symlink_to(MODEL)
    pace = (f"--bytes-per-s={PACE}", f"--pace-until={folder / 'hurry'}")
    with volume(model=False) as name, running_hub(place.parents[1], *pace) as hub:
        env = {"APPLIANCE_TUNE": "first", "APPLIANCE_BUDGET_S": "60" if PICTURES else "15", "APPLIANCE_MODEL": REPO}
        with started(name, env={**env, **hub.environment()}, host_port=free_port()) as stage:
            wait_for(lambda: "listening" in stage.names(), 60, stage.logs)
            yield {**look(browser, stage, folder), "pictures": folder}


@pytest.fixture(scope="module")
def fleet(browser: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a look at three models in memory for two saw."""
    folder = Path(PICTURES) if PICTURES else tmp_path_factory.mktemp("fleet")
    folder.chmod(0o777)
    with three_in_memory_for_two(free_port()) as stage:
        return look(browser, stage, folder, "fleet")


def look(browser: str, stage: Stage, folder: Path, *what: str) -> dict[str, Any]:
    """Let the browser look, and end the engine when it asks for that."""
    argv = [
        *("docker", "run", "--rm", "--network", f"container:{stage.container.id}", "--env", "KEY"),
        *("--volume", f"{HERE / 'look.py'}:/look.py:ro", "--volume", f"{folder}:/pictures"),
        *(browser, "python3", "/look.py", stage.base, "/pictures", *what),
    ]
    wanted = {folder / "second": SECOND, folder / "kill": KILL}
    with (
        subprocess.Popen(
            argv, env={**os.environ, "KEY": stage.key()}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as looking,
        ThreadPoolExecutor(1) as beside,
    ):
        told = beside.submit(looking.communicate, timeout=600)
        for mark, words in wanted.items():
            wait_for(lambda mark=mark: mark.exists() or told.done(), 600, stage.logs)
            if mark.exists():
                stage.run("/bin/sh", "-c", words)
        out, err = told.result()
    for mark in (*wanted, folder / "hurry"):
        mark.unlink(missing_ok=True)
    assert looking.returncode == 0, f"{err[-3000:]}\n{stage.logs()[-2000:]}"
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_first_start_is_watched_from_its_beginning(seen: dict[str, Any]) -> None:
    phases = seen["start"]["phases"]
    assert phases[-1] == "ready", phases
    for phase in ("fetching", "tuning"):
        assert phase in phases, phases


def test_a_fetch_shows_what_how_much_how_fast_and_how_long(seen: dict[str, Any]) -> None:
    words = seen["start"]["fetching"]
    assert MODEL.name in words
    assert re.search(r"· about .+ left · \d+\.\d / 98\.4 MB, \d+\.\d MB/s", words), words
    assert 0 < float(words.split()[-1]) < 1, "the bar"


def test_another_model_that_comes_is_shown_loaded_and_unloaded(seen: dict[str, Any]) -> None:
    found = seen["models"]
    assert not found["was_shown"], "one model needs no list"
    assert "not loaded" in found["before"] or "asleep" in found["before"]
    assert "ready" in found["loaded"]
    assert "GiB" in found["loaded"]
    assert "beside" in found["loaded"]
    assert "asleep" in found["after"]
    assert found["bottom"] <= 900, "the list and the first three views need no scroll on a laptop"
    assert found["requests_of_second"] == 0, "its page shows its own requests"


def test_a_model_that_is_asked_is_loaded_and_another_one_makes_room(fleet: dict[str, Any]) -> None:
    found = fleet["fleet"]
    assert found["states"][0] == "asleep"
    assert found["states"][-1] == "ready"
    assert found["ready"] == 2, "three do not fit"
    assert "gamma needs its memory" in found["three"], "for whom one was sent away"
    assert "gamma is loaded: beside" in found["three"], "the last events"
    assert "idle for" in found["three"]
    assert found["bottom"] <= 900


def test_memory_is_shown_against_what_is_free(fleet: dict[str, Any]) -> None:
    bars = fleet["fleet"]["bars"]
    assert len(bars) == 2
    assert len({end for _, end in bars}) == 1, "one place"
    assert 0 < sum(value for value, _ in bars) <= bars[0][1]


def test_a_chat_with_a_model_that_sleeps_says_what_it_waits_for(fleet: dict[str, Any]) -> None:
    found = fleet["fleet"]["chat"]
    assert re.search(r"loads this model: about [\d.]+ m?s", found["hint"])
    assert found["banners"] == 0, "it can be asked"
    assert "gamma" in found["waiting"]
    assert (found["problems"], found["left"]) == (0, 0)
    assert "tok/s" in found["answer"]


def test_a_refusal_to_load_is_shown_as_text(fleet: dict[str, Any]) -> None:
    assert fleet["fleet"]["refused"] == "there is no room <b>here</b>"


def test_the_page_of_one_of_several_models_shows_its_own_requests(fleet: dict[str, Any]) -> None:
    assert (fleet["fleet"]["requests_of_gamma"], fleet["fleet"]["requests_of_beta"]) == (1, 0)


def test_the_list_of_models_keeps_nobody_out(fleet: dict[str, Any]) -> None:
    views = {"fleet", "fleet, refused", "fleet, dark", "fleet, phone", "fleet, chinese", "chat, asleep"}
    assert {*fleet["axe"]} == views
    assert {name: found for name, found in fleet["axe"].items() if found} == {}
    assert (fleet["violations"], fleet["errors"], fleet["foreign_requests"]) == ([], [], [])
    assert fleet["fleet"]["fleet, phone, overflow"] <= 0
    assert "空闲" in fleet["fleet"]["fleet, chinese"]


def test_an_error_shows_its_code_and_what_to_do(seen: dict[str, Any]) -> None:
    words = seen["error"]["words"]
    assert "engine_died, exit code 45" in words
    assert "killed by SIGKILL" in words
    assert len(words.splitlines()) > 1, "what to do"


def test_what_other_programs_keep_in_the_browser_breaks_nothing(seen: dict[str, Any]) -> None:
    """Errors of the page would be in `errors`. Two planted chats are left, and one that is new."""
    planted = {"chats": 3, "pictures": 0, "elements": 0, "evil": None, "language": "en"}
    assert seen["planted"] == planted


def test_the_login_says_nothing_of_the_appliance(seen: dict[str, Any]) -> None:
    words = seen["start"]["login"]
    assert "API key" in words
    assert "SmolLM" not in words
    assert "ready" not in words
    assert seen["start"]["refused"] == "This key is not accepted."


def test_every_view_has_live_data(seen: dict[str, Any]) -> None:
    views = seen["dashboard"]["views"]
    assert "SmolLM" in views["requests"]
    assert "/v1/chat/completions" in views["requests"]
    assert "ready" in views["now"]
    assert "kv_type" in views["why"]
    assert "measured" in views["why"]
    assert "chosen plan" in views["curve"]
    assert "cores" in views["machine"]
    assert "key there is one" in views["machine"]
    assert seen["dashboard"]["bottom_of_curve"] <= 900, "the first three views need no scroll on a laptop"


def test_a_chat_is_answered_repeated_edited_and_stopped(seen: dict[str, Any]) -> None:
    chat = seen["chat"]
    assert len(chat["answer"]) > 10
    assert re.match(r"\d+ tokens, [\d.]+ tok/s, ", chat["figures"])
    assert chat["again"] == 1
    assert chat["edited"] == "Say hello."
    assert chat["stopped"] == 1


def test_a_hostile_answer_is_text(seen: dict[str, Any]) -> None:
    chat = seen["chat"]
    assert chat["evil"] is None
    assert chat["elements"] == 0
    assert chat["hrefs"] == [None]


def test_nothing_breaks_the_policy_and_nothing_is_loaded_from_elsewhere(seen: dict[str, Any]) -> None:
    assert seen["violations"] == []
    assert seen["errors"] == []
    assert seen["foreign_requests"] == []


def test_nobody_is_kept_out(seen: dict[str, Any]) -> None:
    """axe finds nothing on either page, light and dark, on a laptop and on a phone."""
    names = {
        "login",
        "chat",
        "chat, phone, dark",
        "dashboard",
        "dashboard-dark",
        "dashboard-phone",
        "dashboard-chinese",
        "dashboard-error",
    }
    assert {*seen["axe"]} == {*names, "models"}
    assert {name: found for name, found in seen["axe"].items() if found} == {}


def test_a_phone_needs_no_sideways_scroll(seen: dict[str, Any]) -> None:
    assert seen["dashboard"]["dashboard-phone, overflow"] <= 0


def test_chinese_is_chinese(seen: dict[str, Any]) -> None:
    titles = seen["dashboard"]["dashboard-chinese"]
    assert len(titles) == 5
    assert all(CHINESE.search(title) for title in titles), titles


def test_the_pages_are_small(seen: dict[str, Any]) -> None:
    total = sum(seen["loaded"].values())
    print(f"both pages with all that they load: {total:,} bytes; first paint {seen['paint_ms']} ms")
    assert 20_000 < total <= PAGES_BYTES_MAX, seen["loaded"]


def test_a_page_of_another_program_changes_and_reads_nothing(seen: dict[str, Any]) -> None:
    foreign = seen["foreign"]
    assert foreign["read"] == "not readable"
    assert foreign["statuses"], "the browser sent nothing"
    assert all(status in (401, 403) for status in foreign["statuses"] if status != 200), foreign
    assert foreign["statuses"].count(200) <= 1  # the read that the page was not shown
