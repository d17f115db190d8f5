"""A start on an empty volume: weights chosen, fetched from a hub behind an open gateway, and served."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.image_facts import dump_facts
from tests.builders import IMAGE
from tests.fakes.hub.running import RunningHub
from tests.mounts import fill_up, tmpfs
from tests.process.stages.boot import eventually
from tests.process.stages.recipe import BEST, REPO, cached, empty_home, error_of, fill_hub, put

SLOW = ("--bytes-per-s=200000", "--pace-until")  # the file that ends it follows


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill_hub(tmp_path_factory.mktemp("hub") / "files")


def test_an_empty_volume_is_filled_and_served(tmp_path: Path, weights: Path) -> None:
    hurry = tmp_path / "hurry"
    with empty_home(tmp_path, weights, *SLOW, str(hurry)) as (home, hub):
        with home.serving() as serving:
            serving.event("fetch")
            assert serving.ask("GET", "/health/live")[0] == 200
            ready = eventually(lambda: fetching(serving.ask("GET", "/health/ready")), what=lambda: serving.text)
            assert ready["phase"] == "fetching"
            assert ready["file"] == BEST
            assert 0 < ready["bytes_done"] < ready["bytes_total"]
            assert ready["bytes_per_s"] > 0
            assert ready["seconds_left"] >= 0
            assert BEST in ready["message"]
            (model,) = serving.ask("GET", "/v1/models", key=home.key)[1]["data"]
            assert (model["id"], model["state"]) == ("Tiny-large-q4_0", "fetching")
            assert {"tiny", "tiny:large-q4_0"} <= set(model["aliases"])
            assert model["context_length"] == 32768
            assert serving.document("status")["fetch"]["bytes_total"] == ready["bytes_total"]
            assert serving.document("plan") == {}
            assert serving.document("hardware")["cpu"]
            status, refused = serving.chat()
            assert (status, refused["error"]["code"]) == (503, "model_loading")
            assert serving.ask("POST", "/appliance/v1/tuning", {}, key=home.key)[0] == 503
            eventually(lambda: serving.names().count("fetching") >= 2, what=lambda: serving.text)
            hurry.touch()
            serving.wait_ready()
            assert serving.chat()[0] == 200
            (model,) = serving.ask("GET", "/v1/models", key=home.key)[1]["data"]
            assert (model["id"], model["state"], model["context_length"]) == ("Tiny-large-q4_0", "ready", 32768)
            assert {"tiny", "tiny:large-q4_0"} <= set(model["aliases"])
            assert serving.document("status")["phase"] == "ready"
            (row,) = serving.document("fleet")["models"]  # its name changed while it was fetched
            assert (row["name"], row["state"], row["is_loaded"]) == ("tiny", "ready", True)
            chosen, said = serving.event("model_chosen"), serving.names()
            assert chosen["model"] == "tiny:large-q4_0"
            assert "of 3" in chosen["message"]
            assert said.index("model_chosen") < said.index("fetch") < said.index("fetched") < said.index("engine_start")
            serving.terminate()
        assert [path.stat().st_size for path in cached(home)] == [(weights / REPO / BEST).stat().st_size]
        asked = len(hub.requests())
        with home.serving() as serving:
            serving.wait_ready()
            assert not {"fetch", "fetching"} & set(serving.names())
            assert serving.event("model_chosen")["model"] == "tiny:large-q4_0"
            assert serving.chat()[0] == 200
        assert len(hub.requests()) == asked


def fetching(answer: tuple[int, Any]) -> Any:
    """Return the document of a download once it has a rate, else None."""
    status, document = answer
    assert status in (0, 503), document
    return document if document and document.get("bytes_per_s") and document.get("bytes_done") else None


def test_clients_are_told_when_to_come_back(tmp_path: Path, weights: Path) -> None:
    import http.client  # here: only this test looks at headers

    with empty_home(tmp_path, weights, "--bytes-per-s=50000") as (home, _), home.serving() as serving:
        serving.event("fetch")
        eventually(lambda: fetching(serving.ask("GET", "/health/ready")), what=lambda: serving.text)
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", b"{}", {"Authorization": f"Bearer {home.key}"})
        reply = connection.getresponse()
        left = serving.ask("GET", "/health/ready")[1]["seconds_left"]
        assert reply.status == 503
        assert abs(int(reply.headers["retry-after"]) - left) <= max(3, 0.5 * left)
        connection.close()


def test_a_stop_waits_for_no_hub_and_nothing_that_came_is_lost(tmp_path: Path, weights: Path) -> None:
    hurry = tmp_path / "hurry"
    with empty_home(tmp_path, weights, *SLOW, str(hurry)) as (home, hub):
        with home.serving() as serving:
            eventually(lambda: cached(home, ".incomplete"), what=lambda: serving.text)
            eventually(lambda: cached(home, ".incomplete")[0].stat().st_size > 200_000)
            serving.terminate()
        hurry.touch()
        kept = cached(home, ".incomplete")[0].stat().st_size
        with home.serving() as serving:
            serving.wait_ready()
            assert serving.chat()[0] == 200
        assert begins(hub) == {0, kept}


def test_a_kill_costs_no_byte(tmp_path: Path, weights: Path) -> None:
    hurry = tmp_path / "hurry"
    with empty_home(tmp_path, weights, *SLOW, str(hurry)) as (home, hub):
        with home.serving() as serving:
            eventually(lambda: cached(home, ".incomplete") and cached(home, ".incomplete")[0].stat().st_size > 300_000)
            os.kill(serving.process.pid, signal.SIGKILL)
            serving.wait_exit()
        hurry.touch()
        kept = cached(home, ".incomplete")[0].stat().st_size
        with home.serving() as serving:
            serving.wait_ready()
            assert serving.chat()[0] == 200
        assert begins(hub) == {0, kept}


def begins(hub: RunningHub) -> set[int]:
    """Return the first byte of each body that the hub was asked for."""
    ranges = [row["range"] or "bytes=0-" for row in hub.requests()]
    return {int(text.removeprefix("bytes=").partition("-")[0]) for text in ranges}


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (("--gated",), "it is gated"),
        (("--flip-byte=1000",), "expected sha256"),
        (("--page",), "the address returns another file"),
    ],
)
def test_a_download_that_fails_ends_the_start_with_32(
    tmp_path: Path, weights: Path, knobs: tuple[str, ...], words: str
) -> None:
    with empty_home(tmp_path, weights, *knobs) as (home, _):
        code, text = error_of(home)
        assert code == 32, text
        assert words in text
        assert "hint:" in text
        assert list((home.data / "models").glob("*/snapshots/*/*.gguf")) == []


def test_a_disk_that_fills_up_meanwhile_ends_the_start_and_gets_its_room_back(tmp_path: Path, weights: Path) -> None:
    hurry = tmp_path / "hurry"
    with empty_home(tmp_path, weights, "--bytes-per-s=1000000", f"--pace-until={hurry}") as (home, _):
        shutil.rmtree(home.data)
        with tmpfs(home.data, "size=40m"):
            with home.serving(model="tiny:large-q8_0") as serving:
                eventually(
                    lambda: cached(home, ".incomplete") and cached(home, ".incomplete")[0].stat().st_size > 2**20
                )
                fill_up(home.data / "filler", shutil.disk_usage(home.data).free - 2**20)
                assert serving.wait_exit() == 50, serving.text
                assert "became full while fetching Tiny-large-q8_0.gguf" in serving.text
            assert cached(home) == []
            assert home.command("models", "list").stdout.startswith("no models in")
            assert shutil.disk_usage(home.data).free > 2**20
            (home.data / "filler").unlink()
            hurry.touch()
            with home.serving(model="tiny:small") as serving:
                serving.wait_ready()
                assert serving.chat()[0] == 200


def test_a_volume_that_is_read_only_itself_ends_the_start_with_50(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, hub):
        shutil.rmtree(home.data)
        with tmpfs(home.data, "size=40m"):
            (home.data / "models").mkdir()
            put(home, weights, "Tiny-small-q8_0.gguf")
            subprocess.run(["mount", "-o", "remount,ro", str(home.data)], check=True)
            code, text = error_of(home)
        assert (code, "volume is read-only" in text) == (50, True), text
        assert hub.requests() == []


def test_nothing_is_fetched_offline(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, hub):
        code, text = error_of(home, offline="on")
        assert (code, hub.requests()) == (32, []), text
        assert "nothing is fetched offline" in text
        code, text = error_of(home, offline="on", model=f"{REPO}:Q8_0")
        assert (code, hub.requests()) == (32, []), text


@pytest.mark.parametrize(
    ("settings", "served"),
    [
        ({"tier": "balanced"}, "Tiny-large-q4_0"),
        ({"model": "tiny:small"}, "Tiny-small-q8_0"),
        ({"model": "TINY:Large-Q4_0"}, "Tiny-large-q4_0"),
        ({"model": f"{REPO}:Q4_0"}, "Tiny-large-q4_0"),
        ({"model": f"{REPO}/Tiny-small-q8_0.gguf"}, "Tiny-small-q8_0"),
    ],
)
def test_what_is_asked_for_is_fetched(tmp_path: Path, weights: Path, settings: dict[str, str], served: str) -> None:
    with empty_home(tmp_path, weights) as (home, _), home.serving(**settings) as serving:
        serving.wait_ready()
        (model,) = serving.ask("GET", "/v1/models", key=home.key)[1]["data"]
        assert model["id"] == served
        assert settings.get("model", "tiny") in (*model["aliases"], settings.get("model"))


def test_a_file_that_is_here_and_good_enough_is_taken_and_the_better_one_named(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, hub):
        put(home, weights, "Tiny-large-q8_0.gguf")
        with home.serving() as serving:
            serving.wait_ready()
            assert serving.ask("GET", "/v1/models", key=home.key)[1]["data"][0]["id"] == "Tiny-large-q8_0"
            assert serving.event("model_chosen")["model"] == "tiny:large-q8_0"
            better = serving.event("model_better")
            assert better["model"] == "tiny:large-q4_0"
            assert better["message"].endswith(": `--model tiny:large-q4_0` fetches it")
        assert hub.requests() == []


def test_a_file_that_is_here_and_much_smaller_gives_way(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, _):
        put(home, weights, "Tiny-small-q8_0.gguf")
        with home.serving() as serving:
            serving.wait_ready()
            assert serving.ask("GET", "/v1/models", key=home.key)[1]["data"][0]["id"] == "Tiny-large-q4_0"


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("tiny:huge", 10, "there are tiny:small-q8_0, tiny:large-q4_0, tiny:large-q8_0"),
        ("tiny:large-q9_0", 10, "perhaps you meant tiny:large-q"),
        ("tinny", 10, "perhaps you meant tiny"),
        (f"{REPO}:Q2_K", 10, "Q2_K"),
        ("org/Nothing-GGUF", 10, "repository is private or does not exist"),
        ("registry.example/x:y", 10, "write oci://registry.example/x:y"),
    ],
)
def test_what_is_not_there_is_told_with_near_misses(
    tmp_path: Path, weights: Path, model: str, code: int, words: str
) -> None:
    with empty_home(tmp_path, weights) as (home, _):
        found, text = error_of(home, model=model)
        assert found == code, text
        assert words in text


def test_other_verbs_fetch_nothing(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, hub):
        done = home.command("tune")
        assert done.returncode == 10
        assert "the model is not on the volume: tiny" in done.stderr
        assert "appliance models pull" in done.stderr
        found = home.command("doctor", "--json")
        assert "the model is not on the volume: tiny" in found.stdout
        assert hub.requests() == []


def test_plan_shows_the_files_and_fetches_none(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, hub):
        put(home, weights, "Tiny-small-q8_0.gguf")
        done = home.command("plan", "--files")
        assert done.returncode == 0, done.stderr
        head, *lines = done.stdout.splitlines()
        assert head.split() == [
            "model",
            "size",
            "where",
            "it",
            "would",
            "lie",
            "context",
            "decode",
            "prefill",
            "tier",
            "verdict",
        ]
        assert [line.split()[:2] for line in lines] == [
            ["+", "tiny:small-q8_0"], ["*", "tiny:large-q4_0"], ["tiny:large-q8_0", "12.6"],
        ]  # fmt: skip
        document = json.loads(home.command("plan", "--files", "--json").stdout)
        assert document["chosen"] == "tiny:large-q4_0"
        assert [row["missing_bytes"] == 0 for row in document["files"]] == [True, False, False]
        only = json.loads(home.command("plan", "--files", "--json", "tiny:small").stdout)
        assert [(row["model"], row["verdict"]) for row in only["files"]] == [("tiny:small-q8_0", "chosen")]
        assert hub.requests() == []
        of_repo = json.loads(home.command("plan", "--files", "--json", REPO).stdout)
        assert {row["model"] for row in of_repo["files"]} == {f"{REPO}:Q4_0", f"{REPO}:Q8_0"}
        assert len(of_repo["files"]) == 3
        whole = sum(path.stat().st_size for path in (weights / REPO).iterdir())
        assert 0 < hub.bytes_sent < whole / 2
        assert list((home.data / "models").glob("models--*/snapshots")) == []


def test_plan_of_a_model_that_is_not_here(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, hub):
        done = home.command("plan")
        assert done.returncode == 0, done.stderr
        assert "not on the volume: a start fetches tiny:large-q4_0 first" in done.stdout
        assert "a prediction" in done.stdout
        assert hub.requests() == []
        document = json.loads(home.command("plan", "--json", f"{REPO}:Q4_0").stdout)
        assert document["fetches"]["bytes"] == (weights / REPO / BEST).stat().st_size
        assert document["plan"]["context"] == 32768
        assert document["plan"]["model_path"].endswith(f"/{BEST}")


def test_plan_where_nothing_can_be_served_ends_as_a_start_would(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, _):
        done = home.command("plan", "--files", "--offline", "on")
        assert (done.returncode, done.stdout.count("offline: not on the volume")) == (32, 3)


@pytest.mark.parametrize("has_recipe", [True, False])
def test_a_start_whose_model_is_here_imports_nothing_that_fetches(
    tmp_path: Path, weights: Path, *, has_recipe: bool
) -> None:
    with empty_home(tmp_path, weights) as (home, _):
        put(home, weights, "Tiny-small-q8_0.gguf")
        if not has_recipe:
            (home.folder / "facts/image_facts.json").write_text(dump_facts(IMAGE))
        home.variables = {**home.variables, "PYTHONPROFILEIMPORTTIME": "1"}
        model = {"model": "tiny:small"} if has_recipe else {}
        with home.serving(**model) as serving:
            serving.wait_ready()
            imported = {line.rpartition("|")[2].strip() for line in serving.text.splitlines() if "|" in line}
        assert "appliance.serve.run" in imported
        assert not [name for name in imported if name.startswith(("appliance.weights", "huggingface_hub", "aiohttp"))]


def test_a_second_start_of_fetched_weights_imports_no_client(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, _):
        with home.serving() as serving:
            serving.wait_ready()
            serving.terminate()
        home.variables = {**home.variables, "PYTHONPROFILEIMPORTTIME": "1"}
        with home.serving() as serving:
            serving.wait_ready()
            imported = {line.rpartition("|")[2].strip() for line in serving.text.splitlines() if "|" in line}
        slow = (
            "huggingface_hub",
            "aiohttp",
            "appliance.weights.download.fetch",
            "appliance.weights.download.hub",
            "appliance.selection.remote",
        )
        assert not [name for name in imported if name.startswith(slow)]
