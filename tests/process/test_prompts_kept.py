"""Prompts that an engine keeps on the volume: who gets the folder, the key of its files, and what removes them."""

from __future__ import annotations

import http.client
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.image_facts import dump_facts, parse_engine_facts
from tests.mounts import tmpfs
from tests.process.stages.boot import Home, Serving, eventually, write_model

FIRST = [{"role": "user", "content": "one two three four five six"}]
NEXT = [*FIRST, {"role": "assistant", "content": "seven"}, {"role": "user", "content": "eight nine"}]
FLAGS = ("--cache-disk", "--cache-disk-mib", "--cache-disk-key", "--cache-disk-stop-ms", "--metrics")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A volume, and an engine that can keep prompts."""
    home = Home.make(tmp_path / "home")
    path = home.folder / "facts/engine_facts.json"
    facts = parse_engine_facts(path.read_text())
    path.write_text(dump_facts(replace(facts, flags=(*facts.flags, *FLAGS), kv_types=("f16", "bf16"))))
    return home


@pytest.fixture
def served(home: Home) -> Iterator[Serving]:
    with home.serving() as serving:
        serving.wait_ready()
        yield serving


def folder_of(home: Home) -> Path:
    return home.data / "cache/prompts"


def saved(home: Home) -> list[str]:
    return sorted(path.name for path in folder_of(home).glob("*.prompt"))


def options_of(line: str) -> dict[str, str]:
    """Return the engine's options for saved prompts, from its command line."""
    words = line.split()
    return {flag: words[words.index(flag) + 1] for flag in FLAGS[:-1] if flag in words}


def key_of(home: Home) -> str:
    """Return the key of the engine that was started last."""
    return options_of(home.started[-1])["--cache-disk-key"]


def ask(
    serving: Serving, messages: Sequence[Any] = FIRST, key: str = "", model: str = "any", **headers: str
) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    told = {"Authorization": f"Bearer {key or serving.home.key}", "X-Appliance-Receipt": "1"}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({"model": model, "messages": messages}), told)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    assert "timings" in answer, answer
    return answer


def answered(home: Home, messages: Sequence[Any] = FIRST, **settings: str) -> dict[str, Any]:
    """Serve one request in an appliance of its own."""
    with home.serving(**settings) as serving:
        serving.wait_ready()
        answer = ask(serving, messages)
        serving.terminate()
    return answer


def named_key(serving: Serving, *words: str) -> str:
    """Make or rotate a key, and wait until the gateway knows it."""
    done = serving.home.command("keys", *words)
    assert done.returncode == 0, done.stderr
    key = done.stdout.strip()
    eventually(lambda: serving.ask("GET", "/v1/models", key=key)[0] == 200)
    return key


def test_a_conversation_goes_on_after_a_restart(home: Home) -> None:
    answered(home)
    key = key_of(home)
    assert [name.split(".")[0] for name in saved(home)] == [key]
    with home.serving() as serving:
        serving.wait_ready()
        assert key_of(home) == key
        answer = ask(serving, NEXT)
        assert (answer["timings"]["cache_n"], answer["timings"]["disk_n"]) == (6, 6)
        receipt = answer["usage"]["appliance"]
        assert (receipt["tokens_cached"], receipt["tokens_from_disk"]) == (6, 6)
        assert ask(serving, NEXT)["usage"]["appliance"]["tokens_from_disk"] == 0, "it is in memory by now"
        metrics = serving.ask("GET", "/metrics", key=home.key)[1].splitlines()
        assert 'appliance_prompt_tokens_from_disk_total{model_name="small"} 6.0' in metrics
        assert 'appliance_prompt_disk_loaded_tokens_total{model_name="small"} 6.0' in metrics
        assert 'appliance_prompt_disk_saves_total{model_name="small"} 2.0' in metrics
        serving.terminate()


def test_the_secret_is_in_the_engines_environment_and_nowhere_else(home: Home, served: Serving) -> None:
    secret = (home.data / "secrets/prompts").read_text().strip()
    assert len(secret) == 32
    (pid,) = served.engine_pids()
    assert f"LLAMA_CACHE_DISK_SECRET={secret}" in Path(f"/proc/{pid}/environ").read_text().split("\0")
    ask(served)
    told = [*home.started, served.text, home.command("plan", "--json").stdout]
    told += [json.dumps(served.document(name)) for name in ("status", "plan", "profile", "hardware")]
    assert not any(secret in text for text in told)
    assert folder_of(home).stat().st_mode & 0o777 == 0o770
    assert [(folder_of(home) / name).stat().st_mode & 0o777 for name in saved(home)] == [0o600]
    served.terminate()


def test_only_the_engine_that_serves_gets_the_folder(home: Home) -> None:
    done = home.command("tune", budget_s="5")
    assert done.returncode == 0, done.stderr
    assert home.started
    assert [line for line in home.started if options_of(line)] == []


def test_another_cache_type_has_another_key_of_the_same_model(home: Home) -> None:
    answered(home, kv_type="f16")
    first = key_of(home)
    assert answered(home, NEXT, kv_type="bf16")["timings"]["disk_n"] == 0
    assert key_of(home) != first
    assert key_of(home).split("-")[0] == first.split("-")[0]
    assert answered(home, NEXT, kv_type="f16", ctx_size="2048", threads="1")["timings"]["disk_n"] == 6
    assert key_of(home) == first


def test_a_file_that_was_changed_is_not_used(home: Home) -> None:
    answered(home)
    (path,) = (folder_of(home) / name for name in saved(home))
    path.write_text(path.read_text().replace("six", "6"))
    assert answered(home, NEXT)["timings"]["disk_n"] == 0
    assert path.name not in saved(home)


def test_a_removed_model_takes_its_prompts_along(home: Home) -> None:
    answered(home)
    other = folder_of(home) / f"{'f' * 16}-{'0' * 32}.none.{'0' * 16}.prompt"
    other.write_bytes(b"")
    done = home.command("models", "rm", "small.gguf")
    assert done.returncode == 0, done.stderr
    assert saved(home) == [other.name]


def test_a_key_takes_its_prompts_along_when_it_is_rotated_or_removed(home: Home, served: Serving) -> None:
    ask(served)
    of_own_key = saved(home)
    key = named_key(served, "add", "anna")
    ask(served, NEXT, key)
    hers = set(saved(home)) - set(of_own_key)
    assert len(hers) == 1
    key = named_key(served, "rotate", "anna")
    assert saved(home) == of_own_key
    ask(served, NEXT, key)
    assert {name.split(".")[1] for name in set(saved(home)) - set(of_own_key)}.isdisjoint(
        name.split(".")[1] for name in hers
    )
    assert home.command("keys", "remove", "anna").returncode == 0
    assert saved(home) == of_own_key
    served.terminate()


def test_a_start_removes_the_prompts_of_keys_that_are_gone(home: Home) -> None:
    answered(home)
    (home.data / "secrets/api_key").write_text(f"sk-{'1' * 40}\n")
    with home.serving() as serving:
        serving.wait_ready()
        assert saved(home) == []
        serving.terminate()


def test_a_client_cannot_save_under_another_tag(home: Home, served: Serving) -> None:
    ask(served, FIRST, X_Cache_Owner="none")
    ask(served, NEXT)
    owners = [name.split(".")[1] for name in saved(home)]
    assert len(owners) == 2
    assert len(set(owners)) == 1
    assert owners[0] != "none"
    served.terminate()


def test_without_authentication_prompts_have_no_owner(home: Home) -> None:
    with home.serving(auth="off") as serving:
        serving.wait_ready()
        assert serving.ask("POST", "/v1/chat/completions", {"messages": FIRST})[0] == 200
        assert [name.split(".")[1] for name in saved(home)] == ["none"]
        serving.terminate()


def test_a_model_that_was_unloaded_finds_its_prompt_in_the_folder_of_all(home: Home) -> None:
    write_model(home.data / "models/other.gguf", context=2048)
    (home.data / "appliance.yaml").write_text("models:\n  a: {model: small.gguf}\n  b: {model: other.gguf}\n")
    with home.serving() as serving:
        serving.wait_ready()
        for name in ("a", "b"):
            ask(serving, model=name)
        assert len({name.split("-")[0] for name in saved(home)}) == 2
        for path in ("/models/unload", "/models/load"):
            assert serving.ask("POST", path, {"model": "a"}, key=home.key)[0] == 200
        assert ask(serving, NEXT, model="a")["timings"]["disk_n"] == 6
        assert {options_of(line)["--cache-disk"] for line in home.started} == {str(folder_of(home))}
        serving.terminate()


def test_a_folder_that_cannot_be_made_is_one_warning(home: Home) -> None:
    (home.data / "cache").mkdir(exist_ok=True)
    folder_of(home).write_text("a file in its place")
    with home.serving() as serving:
        serving.wait_ready()
        assert ask(serving)["usage"]["appliance"]["tokens_from_disk"] is None
        assert serving.names().count("prompts_not_kept") == 1
        assert str(folder_of(home)) in serving.event("prompts_not_kept")["message"]
        assert options_of(home.started[-1]) == {}
        serving.terminate()


def test_a_volume_that_is_nearly_full_is_one_warning(home: Home, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "little", "size=100m") as little:
        shutil.copytree(home.data / "models", little / "models")
        home.data = little
        with home.serving() as serving:
            serving.wait_ready()
            assert serving.names().count("prompts_not_kept") == 1
            assert "the volume is nearly full" in serving.event("prompts_not_kept")["message"]
            assert options_of(home.started[-1]) == {}
            serving.terminate()


@pytest.mark.parametrize("setting", ["0", "older engine"])
def test_turned_off_or_unknown_to_the_engine_it_serves_as_before(tmp_path: Path, home: Home, setting: str) -> None:
    if setting == "older engine":
        home = Home.make(tmp_path / "older")
    with home.serving(**({"cache_disk_mib": "0"} if setting == "0" else {})) as serving:
        serving.wait_ready()
        assert "disk_n" not in ask(serving)["timings"]
        assert options_of(home.started[-1]) == {}
        assert "prompts_not_kept" not in serving.names()
        assert "appliance_prompt_disk_saves_total{" not in serving.ask("GET", "/metrics", key=home.key)[1]
        serving.terminate()


def test_the_bound_is_a_quarter_of_the_free_space_at_most(home: Home, served: Serving) -> None:
    volume = os.statvfs(home.data)
    limit_mib = int(options_of(home.started[-1])["--cache-disk-mib"])
    assert 0 < limit_mib <= min(16384, volume.f_blocks * volume.f_frsize / 2**22)
    served.terminate()
