"""Models in the layout of the hub's cache and in other tools' folders, served by the appliance as a process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mounts import tmpfs
from tests.process.stages.boot import ROOT, Home, eventually
from tests.shapes.beside import write_projector
from tests.unit.weights.cache_files import let_others_in, put_cached, put_ollama


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home with an empty volume; its model lies beside the volume."""
    home = Home.make(tmp_path / "home")
    (home.data / "models/small.gguf").rename(tmp_path / "small.gguf")
    return home


@pytest.fixture
def weights(home: Home, tmp_path: Path) -> bytes:
    return (tmp_path / "small.gguf").read_bytes()


@pytest.fixture
def store(tmp_path: Path, weights: bytes) -> Path:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", weights)
    return tmp_path / "ollama"


def test_a_model_of_the_hubs_cache_is_served_by_its_name_and_kept_while_it_is(home: Home, weights: bytes) -> None:
    put_cached(home.data / "models", "org/m-GGUF", "m-Q8_0.gguf", weights)
    put_cached(home.data / "models", "org/m-GGUF", "m-Q4_K_M.gguf", weights + b"1")
    with home.serving(model="org/m-GGUF:Q8_0") as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200
        assert serving.document("status")["model"] == "m-Q8_0"
        refused = home.command("models", "rm", "org/m-GGUF:Q8_0")
        assert refused.returncode == 10
        assert "model is being served, or written: org/m-GGUF/m-Q8_0.gguf" in refused.stderr
        assert home.command("models", "rm", "org/m-GGUF:Q4_K_M").returncode == 0
        assert serving.chat()[0] == 200
        serving.terminate()
    assert home.command("models", "rm", "org/m-GGUF:Q8_0").returncode == 0
    assert not (home.data / "models/models--org--m-GGUF").exists()


def test_the_list_marks_what_the_running_appliance_has_loaded(home: Home, weights: bytes) -> None:
    for name in ("first.gguf", "second.gguf"):
        (home.data / "models" / name).write_bytes(weights)
    with home.serving(model="first") as serving:
        serving.wait_ready()
        eventually(lambda: len(serving.document("fleet")["models"]) == 2)
        head, *rows = home.command("models", beside=serving).stdout.splitlines()[:3]
        assert head.split()[-1] == "now"
        assert [(row.split()[0], row.split()[-1]) for row in rows] == [
            ("first.gguf", "ready"),
            ("second.gguf", "asleep"),
        ]
        listed = json.loads(home.command("models", "--json", beside=serving).stdout)["models"]
        assert [row["serving"] for row in listed] == ["ready", "asleep"]
        serving.terminate()
    after = home.command("models")
    assert (after.stdout.splitlines()[0].split()[-1], after.stderr) == ("state", "")


def test_projector_and_draft_model_of_what_is_served_are_kept(home: Home, weights: bytes) -> None:
    for name in ("small.gguf", "draft.gguf"):
        (home.data / "models" / name).write_bytes(weights)
    write_projector(home.data / "models/mmproj-small-F16.gguf", 64)
    with home.serving(model="small", draft_model="draft.gguf") as serving:
        serving.wait_ready()
        for name in ("mmproj-small-F16.gguf", "draft.gguf", "small.gguf"):
            refused = home.command("models", "rm", name)
            assert refused.returncode == 10, name
            assert f"model is being served, or written: {name}" in refused.stderr
        serving.terminate()
    for name in ("mmproj-small-F16.gguf", "draft.gguf", "small.gguf"):
        assert home.command("models", "rm", name).returncode == 0


def test_a_model_of_ollama_in_a_read_only_mount_is_served_by_its_name_there(home: Home, store: Path) -> None:
    mount = ["mount", "--bind", "-o", "ro", str(store), str(store)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with home.serving(model="qwen3:4b", model_dirs=str(store)) as serving:
            serving.wait_ready()
            assert serving.chat()[0] == 200
            assert serving.document("status")["model"] == "qwen3:4b"
            serving.terminate()
    finally:
        subprocess.run(["umount", str(store)], check=True)
    assert "--alias qwen3:4b" in home.started[0]
    assert not list((home.data / "models").iterdir())


def test_without_a_name_the_only_mounted_model_is_served_and_its_profile_is_shown(home: Home, store: Path) -> None:
    tuned = home.command("tune", model_dirs=str(store))
    assert tuned.returncode == 0, tuned.stderr
    listed = home.command("models", model_dirs=str(store))
    (profile,) = home.profiles.glob("*.json")
    (row,) = [line for line in listed.stdout.splitlines() if line.startswith("qwen3:4b")]
    assert profile.stem[:8] in row
    planned = home.command("plan", model_dirs=str(store))
    assert re.search(r"^  alias +qwen3:4b \[name in its folder\]$", planned.stdout, re.MULTILINE)


def test_doctor_looks_at_mounted_folders(home: Home, store: Path) -> None:
    assert "none is on the volume" in home.command("doctor", model_dirs="none").stdout
    assert re.search(r"model +qwen3:4b: llama, ", home.command("doctor", model_dirs=str(store)).stdout)


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("ghcr.io/org/m", 10, "write oci://ghcr.io/org/m"),
        ("qwen3:4c", 10, "perhaps you meant qwen3:4b"),
        ("something else", 10, "in mounted folders:\n  qwen3:4b (Ollama)"),
    ],
)
def test_what_is_not_there_ends_with_what_is(home: Home, store: Path, model: str, code: int, words: str) -> None:
    done = home.command("serve", model=model, model_dirs=str(store))
    assert done.returncode == code
    assert words in done.stderr


def test_an_import_that_is_stopped_leaves_nothing(home: Home, tmp_path: Path, weights: bytes) -> None:
    """The source is closed to others, so that it is copied, and large enough to be stopped in the middle."""
    source = tmp_path / "big.gguf"
    source.write_bytes(weights)
    with source.open("r+b") as file:
        file.truncate(4 * 2**30)
    source.chmod(0o600)
    models = home.data / "models"
    if shutil.disk_usage(models).free < 6 * 2**30:
        pytest.skip("the disk has too little room for it")
    program = subprocess.Popen(
        [sys.executable, "-m", "appliance", "models", "import", str(source)],
        env=home.environment(tmp_path),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 90
    while not any(path.stat().st_size > 2**22 for path in models.glob(".big.gguf.*.part")):
        if program.poll() is not None and "shares its blocks" in (program.communicate()[0] or b"").decode():
            pytest.skip("this disk shares blocks: nothing is copied")
        assert time.monotonic() < deadline
        if program.poll() is not None:
            pytest.skip("this disk copies 4 GiB faster than a test looks")
        time.sleep(0.01)
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == 143
    program.communicate()
    assert list(models.iterdir()) == []


def test_a_disk_that_fills_up_while_it_is_copied_leaves_nothing(home: Home, tmp_path: Path, weights: bytes) -> None:
    """Another process takes the room after the check."""
    source = tmp_path / "m.gguf"
    source.write_bytes(weights)
    with source.open("r+b") as file:
        file.truncate(200 * 2**20)
    shutil.rmtree(home.data)
    with tmpfs(home.data, "size=300m") as data:
        (data / "models").mkdir()
        for _ in range(20):  # until the room is taken before the copy is over
            with subprocess.Popen(
                [sys.executable, "-c", EATER, str(data / "eaten"), str(data / "models")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as eater:
                assert eater.stdout
                assert eater.stdout.readline() == b"waiting\n"
                done = home.command("models", "import", str(source))
                eater.kill()
            if done.returncode:
                break
            for path in (data / "eaten", data / "models/m.gguf"):
                path.unlink(missing_ok=True)
        assert done.returncode == 50, done.stdout
        assert "volume is full" in done.stderr
        assert list((data / "models").iterdir()) == []


EATER = """
import pathlib, sys, time
eaten, models = map(pathlib.Path, sys.argv[1:])
print("waiting", flush=True)
while not list(models.glob(".m.gguf.*.part")):
    time.sleep(0.001)
with eaten.open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(2**20))
    except OSError:
        pass
time.sleep(60)
"""


def test_another_user_of_group_0_reads_what_was_imported(home: Home, tmp_path: Path, weights: bytes) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    source = tmp_path / "m.gguf"
    source.write_bytes(weights)
    source.chmod(0o600)
    assert home.command("models", "import", str(source)).returncode == 0
    imported = home.data / "models/m.gguf"
    code = f"import os; os.setgid(0); os.setuid(12345); print(len(open({str(imported)!r}, 'rb').read()))"
    let_others_in(home.data)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(len(weights)), done.stderr
    assert f"sha256 {hashlib.sha256(weights).hexdigest()}" in home.command("models", "verify").stdout
