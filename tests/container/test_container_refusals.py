"""Everything a user can get wrong, on the real image: the code, the words, and nothing lost."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator

import docker
import pytest
import requests

from tests.container.stages.containers import IMAGE, MODEL, STRANGER, ended, executed, started, volume

MEASURING = {"APPLIANCE_TUNE": "first"}


@pytest.fixture(scope="module")
def stocked() -> Iterator[str]:
    with volume() as name:
        yield name


Refuse = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def refuse(stocked: str) -> Iterator[Refuse]:
    """One container that sleeps: each start in it has words and variables of its own, and is expected to end."""
    with started(stocked, "infinity", entrypoint="sleep") as stage:

        def start(*words: str, **variables: str) -> tuple[int, str]:
            return executed(stage.container, "appliance", *words, **variables)

        yield start


@pytest.fixture
def empty() -> Iterator[str]:
    with volume(model=False) as name:
        yield name


def put(volume_name: str, files: dict[str, bytes], *, folder: str = "models") -> None:
    """Put files of any name and content on the volume."""
    client = docker.from_env()
    container = client.containers.create(IMAGE, volumes={volume_name: {"bind": "/data"}}, network_mode="none")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.gid = len(data), 0o664, 0
            archive.addfile(entry, io.BytesIO(data))
    try:
        container.put_archive("/data", buffer.getvalue())
    finally:
        container.remove(force=True)
        client.close()


def test_no_model(empty: str) -> None:
    code, words = ended(empty)
    assert code == 10
    assert "no model was named and none is on the volume: /data/models" in words
    assert "hint: " in words


def test_model_that_is_not_there_names_the_near_miss(refuse: Refuse) -> None:
    code, words = refuse("serve", "SmolLM2-135M-Instruct.Q4_l.gguf")
    assert code == 10
    assert "perhaps you meant SmolLM2-135M-Instruct.Q4_1.gguf" in words


@pytest.mark.parametrize(
    ("kind", "words"),
    [("0-byte", "empty"), ("png", "GGUF"), ("cut in its header", "byte"), ("cut in its weights", "byte")],
)
def test_damaged_model_is_30_with_the_cause(empty: str, kind: str, words: str) -> None:
    whole = MODEL.read_bytes()
    data = {
        "0-byte": b"",
        "png": b"\x89PNG\r\n\x1a\n" + bytes(64),
        "cut in its header": whole[:1_000_000],
        "cut in its weights": whole[:90_000_000],
    }[kind]
    put(empty, {"damaged.gguf": data})
    code, said = ended(empty)
    assert code == 30
    assert "/data/models/damaged.gguf" in said
    assert words in said


def test_flags_without_a_verb_are_those_of_serve(stocked: str) -> None:
    code, words = ended(stocked, "--ctx-size", "none")
    assert code == 10
    assert "'none' (flag --ctx-size)" in words
    assert ended(stocked, "--version")[0] == 0


def test_directory_as_model(refuse: Refuse) -> None:
    code, words = refuse("serve", "/data/models")
    assert code == 30
    assert "model is a folder: /data/models" in words


def test_model_bigger_than_the_memory_limit(stocked: str) -> None:
    code, words = ended(stocked, mem_limit="200m")
    assert code == 31
    assert "model does not fit" in words
    assert "memory limit of this container: 200 MiB" in words


@pytest.mark.parametrize(
    ("argv", "env", "code", "words"),
    [
        (("serve", "--ctx-size", "10"), {}, 10, "ctx_size is outside 256"),
        (("serve", "--ctx-szie", "4096"), {}, 2, "perhaps you meant '--ctx-size'"),
        (("serve",), {"APPLIANCE_CTX_SZIE": "4096"}, 10, "perhaps you meant 'APPLIANCE_CTX_SIZE'"),
        (("sevre",), {}, 2, "serve"),
    ],
)
def test_misspelt_settings(refuse: Refuse, argv: tuple[str, ...], env: dict[str, str], code: int, words: str) -> None:
    found, said = refuse(*argv, **env)
    assert found == code
    assert words in said


def test_a_read_only_root_without_a_folder_to_write_to(stocked: str) -> None:
    code, words = ended(stocked, tmpfs={})
    assert code == 10
    assert "setting runtime_dir names a folder that cannot be written: /tmp (default): read-only file system" in words
    assert "start it with --tmpfs /tmp" in words
    assert "Traceback" not in words


def test_misspelt_setting_in_the_file(empty: str) -> None:
    put(empty, {"appliance.yaml": b"ctx_szie: 4096\n"}, folder=".")
    code, words = ended(empty)
    assert code == 10
    assert "perhaps you meant 'ctx_size'" in words


def test_read_only_volume(stocked: str) -> None:
    code, words = ended(stocked, mode="ro")
    assert code == 50
    assert "volume is read-only: /data" in words


def test_full_volume() -> None:
    code, words = ended(None, tmpfs={"/tmp": "", "/data": "size=32k,mode=0775"})
    assert code == 50
    assert "volume is full: /data" in words


def test_volume_of_somebody_else() -> None:
    code, words = ended(None, tmpfs={"/tmp": "", "/data": "uid=7777,gid=7777,mode=0700"})
    assert code == 50
    assert "volume is not writable by user 12345, group 0: /data belongs to 7777:7777" in words


def test_user_without_group_0_is_told_what_to_do(empty: str) -> None:
    code, words = ended(empty, user="12345:12345")
    assert code == 50
    assert "run with `--user ANY:0`" in words
    assert STRANGER.endswith(":0")


def test_port_taken_inside_the_container(stocked: str) -> None:
    with started(stocked) as stage:
        stage.wait_ready()
        code, output = stage.container.exec_run(["appliance", "serve", "--tune", "off"])
    assert code == 10
    assert b"cannot listen on port 11435" in output


def test_corrupt_profile_is_set_aside_and_measured_again(empty: str) -> None:
    with volume() as name:
        with started(name, env=MEASURING) as stage:
            stage.wait_ready()
            profile = stage.run("/bin/sh", "-c", "ls /data/profiles/*.json").strip()
        put(name, {profile.rsplit("/", 1)[1]: b'{"schema": 1, "torn'}, folder="profiles")
        with started(name, env=MEASURING) as stage:
            stage.wait_ready()
            assert "profile_set_aside" in stage.names()
            assert "tuned" in stage.names()
            assert ".corrupt" in stage.run("ls", "/data/profiles")


def test_cpu_and_memory_limits_are_obeyed(stocked: str) -> None:
    with started(stocked, nano_cpus=1_000_000_000, mem_limit="700m") as stage:
        stage.wait_ready()
        plan = stage.get("/appliance/v1/plan", headers=stage.authorized()).json()
    assert plan["launch"]["threads"] == 1
    assert plan["memory"]["total"] < 700
    assert plan["launch"]["cache_ram_mib"] >= 128


def test_a_limit_of_400_mib_serves_the_demo_model(stocked: str) -> None:
    """The weights take 92 MiB and their copies as much. Optional memory is dropped; a long prompt still fits the
    limit."""
    with started(stocked, mem_limit="400m", memswap_limit="400m") as stage:
        stage.wait_ready()
        body = {"messages": [{"role": "user", "content": "one two three " * 200}], "max_tokens": 16}
        url = stage.base + "/v1/chat/completions"
        answered = requests.post(url, json=body, headers=stage.authorized(), timeout=120)
        plan = stage.get("/appliance/v1/plan", headers=stage.authorized()).json()
        assert answered.status_code == 200
        assert plan["memory"]["total"] < 400
        assert "engine_exit" not in stage.names()


def test_two_first_starts_on_one_volume_measure_once() -> None:
    with volume() as name, started(name, env=MEASURING) as one, started(name, env=MEASURING) as other:
        one.wait_ready()
        other.wait_ready()
        assert sorted("tune_start" in stage.names() for stage in (one, other)) == [False, True]
