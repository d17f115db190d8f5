"""Downloads that are killed, stopped, shared, or run out of room; caches of others."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.errors import DownloadError, VolumeError
from appliance.settings import HubSettings
from appliance.weights.cache.download_set import Wanted
from appliance.weights.cache.hub_layout import RepoFolder, find
from appliance.weights.download.fetch import fetch
from appliance.weights.download.hub import resolve
from appliance.weights.download.locks import locked
from appliance.weights.download.meter import FetchProgress
from tests.fakes.hub.running import MIB, REPO, RunningHub, gguf_bytes, put, running_hub
from tests.mounts import fill_up, tmpfs
from tests.process.stages.fetching import begin, ended, until

NAME = "Tiny-Q4_K_M.gguf"
DATA = gguf_bytes(16 * MIB)
SHA256 = hashlib.sha256(DATA).hexdigest()
FOLDER = "models--org--Tiny-GGUF"
SLOW = ("--bytes-per-s", str(MIB), "--pace-until")  # the file that ends it follows
IS_ROOT = os.geteuid() == 0
# The real client in a process of its own, as vLLM has it.
CLIENT = f"""
import sys
from huggingface_hub import hf_hub_download
print(hf_hub_download("{REPO}", "{NAME}", cache_dir=sys.argv[1], local_files_only="local" in sys.argv))
"""


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    put(tmp_path / "hub", NAME, DATA)
    return tmp_path / "hub"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def partial(models: Path) -> Path:
    return RepoFolder(root=models, name=FOLDER).partial(SHA256)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def client_of(hub: RunningHub, cache: Path, *words: str) -> subprocess.Popen[str]:
    """Start the hub's own client, which downloads into `cache`."""
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cache)}
    argv = [sys.executable, "-c", CLIENT, str(cache), *words]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)


def remount_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def ignore(_: FetchProgress) -> None:
    """Do nothing with progress."""


def room(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def test_a_killed_download_is_gone_on_with(tmp_path: Path, shelf: Path) -> None:
    """The second run asks only for the rest, so that nothing is fetched twice."""
    data = tmp_path / "data"
    path = partial(data / "models")
    with running_hub(shelf, *SLOW, str(tmp_path / "hurry")) as hub:
        with begin(hub, data, "pull", REPO) as program:
            until(lambda: size_of(path) > MIB, "1 MiB")
            program.kill()
            program.wait()
        left = size_of(path)
        (tmp_path / "hurry").touch()
        assert left < len(DATA)
        code, out, err = ended(hub, data, "pull", REPO, "--json")
        asked = [row["range"] for row in hub.requests(host="cdn")]
    assert code == 0, err
    assert asked[-1] == f"bytes={left}-"
    assert len(asked) == 2
    (row,) = json.loads(out)
    assert row["state"] == "fetched"
    assert Path(row["files"][0]).read_bytes() == DATA
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_waits_for_no_hub_and_loses_nothing(tmp_path: Path, shelf: Path, number: signal.Signals) -> None:
    data = tmp_path / "data"
    path = partial(data / "models")
    with running_hub(shelf, "--stall-after", str(5 * MIB)) as hub, begin(hub, data, "pull", REPO) as program:
        until(lambda: size_of(path) == 5 * MIB, "5 MiB")
        began = time.monotonic()
        program.send_signal(number)
        _, err = program.communicate(timeout=90)
        assert time.monotonic() - began < 60.0
    assert program.returncode == (143 if number == signal.SIGTERM else 130)
    assert "what was fetched is kept" in err
    assert size_of(path) == 5 * MIB


def test_a_stop_while_the_hub_is_silent(tmp_path: Path, shelf: Path) -> None:
    """A request to the hub cannot be cancelled. The stop does not wait for its answer."""
    with running_hub(shelf, "--hang", "list") as hub, begin(hub, tmp_path / "data", "pull", REPO) as program:
        until(lambda: bool(hub.requests()), "a question")
        began = time.monotonic()
        program.terminate()
        _, err = program.communicate(timeout=90)
        assert time.monotonic() - began < 60.0
    assert program.returncode == 143, err
    assert "Traceback" not in err


@pytest.mark.parametrize("knobs", [("--hang", "list"), ("--hang", "file"), ("--fail", "file=500*99")])
async def test_every_wait_can_be_cancelled(models: Path, shelf: Path, knobs: tuple[str, ...]) -> None:
    with running_hub(shelf, *knobs) as hub:

        async def story() -> None:
            settings = hub.settings(patience_s=3600.0)
            await fetch(await resolve(REPO, settings), models, settings, ignore)

        task = asyncio.create_task(story())
        await asyncio.sleep(1.0)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 60.0


async def test_one_that_waits_tells_of_the_file_also_once_it_is_whole(models: Path, shelf: Path) -> None:
    """The file is renamed after the other process's last byte and before it releases the lock."""
    folder = RepoFolder(root=models, name=FOLDER)
    folder.make()
    folder.partial(SHA256).write_bytes(DATA[:MIB])
    told: list[int] = []
    with running_hub(shelf) as hub:
        wanted = await resolve(REPO, hub.settings())
        async with locked(folder.lock(SHA256), lambda: None):
            fetching = asyncio.create_task(
                fetch(wanted, models, hub.settings(), lambda seen: told.append(seen.bytes_done))
            )
            await asyncio.to_thread(until, lambda: MIB in told, "a word of the part")
            with folder.partial(SHA256).open("ab") as part:
                part.write(DATA[MIB:])
            folder.partial(SHA256).rename(folder.blob(SHA256))
            await asyncio.to_thread(until, lambda: len(DATA) in told, "a word of the whole")
        (path,) = await fetching
        assert hub.bytes_sent == 0
    assert path.read_bytes() == DATA
    assert told == sorted(told)


async def test_two_that_want_the_same_wait_for_one_download(tmp_path: Path, shelf: Path) -> None:
    seen: list[FetchProgress] = []
    data = tmp_path / "data"
    models = data / "models"
    hurry = tmp_path / "hurry"

    def on_progress(progress: FetchProgress) -> None:
        """Let the other download go on slowly until this one has waited, and has been told of more bytes."""
        seen.append(progress)
        waited = [each.bytes_done for each in seen if each.waiting_for]
        if waited and waited[-1] > waited[0]:
            hurry.touch()

    with running_hub(shelf, *SLOW, str(hurry)) as hub:
        wanted = await resolve(REPO, hub.settings())
        with begin(hub, data, "pull", REPO) as program:
            await asyncio.to_thread(until, lambda: size_of(partial(models)) > MIB, "1 MiB")
            (path,) = await fetch(wanted, models, hub.settings(), on_progress)
            _, err = await asyncio.to_thread(program.communicate, timeout=90)
        assert hub.bytes_sent == len(DATA)
    assert program.returncode == 0, err
    assert path.read_bytes() == DATA
    waited = [progress for progress in seen if progress.waiting_for == f"another download of {NAME}"]
    assert waited
    assert waited[0].describe().endswith(f"waiting for another download of {NAME}")
    assert waited[-1].bytes_done > waited[0].bytes_done > 0  # of the other one


async def test_one_that_waits_goes_on_when_the_other_is_killed(tmp_path: Path, shelf: Path) -> None:
    data = tmp_path / "data"
    models = data / "models"
    waits = asyncio.Event()

    def on_progress(progress: FetchProgress) -> None:
        if progress.waiting_for:
            waits.set()

    hurry = tmp_path / "hurry"
    with running_hub(shelf, *SLOW, str(hurry)) as hub:
        wanted = await resolve(REPO, hub.settings())
        with begin(hub, data, "pull", REPO) as program:
            await asyncio.to_thread(until, lambda: size_of(partial(models)) > MIB, "1 MiB")
            task = asyncio.create_task(fetch(wanted, models, hub.settings(), on_progress))
            await asyncio.wait_for(waits.wait(), 60)
            program.kill()
            await asyncio.to_thread(program.wait)
        hurry.touch()
        left = size_of(partial(models))
        (path,) = await task
        assert hub.requests(host="cdn")[-1]["range"] == f"bytes={left}-"
    assert path.read_bytes() == DATA


async def test_the_hubs_own_client_holds_the_same_lock(models: Path, shelf: Path, tmp_path: Path) -> None:
    """The hub's client downloads. We wait for it and take its blob, and nothing is sent twice."""
    seen: list[FetchProgress] = []

    def on_progress(progress: FetchProgress) -> None:
        seen.append(progress)
        if progress.waiting_for:
            (tmp_path / "hurry").touch()

    with running_hub(shelf, *SLOW, str(tmp_path / "hurry")) as hub:
        wanted = await resolve(REPO, hub.settings())
        with client_of(hub, models) as client:
            blobs = models / FOLDER / "blobs"
            await asyncio.to_thread(until, lambda: any(blobs.glob("*.incomplete")), "its partial file")
            paths = await fetch(wanted, models, hub.settings(), on_progress)
            out, _ = await asyncio.to_thread(client.communicate, timeout=90)
        assert hub.bytes_sent == len(DATA)
    assert paths == (Path(out.strip()),)
    assert f"another download of {NAME}" in [progress.waiting_for for progress in seen]


@pytest.mark.parametrize("word", ["local", "online"])
async def test_the_hubs_own_client_finds_what_we_fetched(models: Path, shelf: Path, word: str) -> None:
    with running_hub(shelf) as hub:
        paths = await fetch(await resolve(REPO, hub.settings()), models, hub.settings(), ignore)
        with client_of(hub, models, word) as client:
            out, _ = await asyncio.to_thread(client.communicate, timeout=90)
        assert hub.bytes_sent == len(DATA)
    assert paths == (Path(out.strip()),)


async def test_orphaned_partial_files_go_and_others_stay(models: Path, shelf: Path) -> None:
    """Three partial files go: one of the real client that was killed, one of a blob that is there, and one of last
    month. A recent one of another blob stays."""
    folder = RepoFolder(root=models, name=FOLDER)
    folder.make()
    done = folder.blob("a" * 64)
    done.write_bytes(b"done")
    old = folder.partial("d" * 64)
    gone = [folder.blobs / f"{'b' * 64}.0123abcd.incomplete", folder.partial(done.name), old]
    other = folder.partial("c" * 64)
    for path in (*gone, other):
        path.write_bytes(bytes(MIB))
    os.utime(old, (time.time() - 30 * 86400,) * 2)
    notes: list[str] = []
    with running_hub(shelf) as hub:
        await fetch(await resolve(REPO, hub.settings()), models, hub.settings(), ignore, notes.append)
    assert [path for path in gone if path.exists()] == []
    assert other.exists()
    assert notes == ["removed partial files of downloads that ended: 3.1 MB"]


async def test_the_room_is_asked_for_before_a_byte_comes(tmp_path: Path, shelf: Path) -> None:
    with running_hub(shelf) as hub, tmpfs(tmp_path / "small", "size=24m") as small:
        with pytest.raises(VolumeError) as caught:
            await fetch(await resolve(REPO, hub.settings()), small, hub.settings(), ignore)
        assert hub.bytes_sent == 0
    assert caught.value.exit_code == 50
    assert caught.value.message == f"volume has no room for {REPO}: {small}: 25.2 MB free, 33.6 MB needed"
    assert "take a smaller one" in str(caught.value.hint)


@pytest.mark.parametrize("before", [0, 3 * MIB])
async def test_a_disk_that_fills_up_gets_its_room_back(tmp_path: Path, shelf: Path, before: int) -> None:
    """Somebody else takes the room that was there at the start. What an earlier run had fetched is kept."""
    with running_hub(shelf, "--bytes-per-s", str(24 * MIB)) as hub, tmpfs(tmp_path / "small", "size=40m") as small:
        wanted = await resolve(REPO, hub.settings())
        path = partial(small)
        path.parent.mkdir(parents=True)
        path.write_bytes(DATA[:before])
        filled: list[int] = []

        def fill(progress: FetchProgress) -> None:
            if progress.bytes_done > 6 * MIB and not filled:
                filled.append(room(small))
                fill_up(small / "filler", filled[0] - MIB)

        with pytest.raises(VolumeError, match=f"became full while fetching {NAME}: .* were removed again") as caught:
            await fetch(wanted, small, hub.settings(), fill)
        assert size_of(path) == before
        assert path.exists() == bool(before)
        assert room(small) > 6 * MIB - before
        assert find(wanted, [small]) is None
        (small / "filler").unlink()
        assert (await fetch(wanted, small, hub.settings(), ignore))[0].read_bytes() == DATA
    assert ("3.1 MB of an earlier run are kept" in caught.value.message) == bool(before)
    assert caught.value.exit_code == 50


async def test_a_disk_that_fills_up_with_a_file_of_unknown_size(tmp_path: Path, shelf: Path) -> None:
    with running_hub(shelf, "--chunked", "--no-ranges") as hub, tmpfs(tmp_path / "small", "size=8m") as small:
        wanted = await resolve(f"{hub.cdn}/blob/{REPO}/{NAME}", hub.settings())
        assert wanted.bytes is None
        with pytest.raises(VolumeError, match="became full"):
            await fetch(wanted, small, hub.settings(), ignore)
        assert room(small) > 7 * MIB


async def cached(folder: Path, hub: HubSettings) -> Wanted:
    """Fill a cache of somebody else."""
    wanted = await resolve(REPO, hub)
    await fetch(wanted, folder, hub, ignore)
    return wanted


async def test_a_cache_that_is_mounted_read_only_is_read(tmp_path: Path, models: Path, shelf: Path) -> None:
    with running_hub(shelf) as hub, tmpfs(tmp_path / "hf", "size=64m") as cache:
        wanted = await cached(cache, hub.settings())
        remount_read_only(cache)
        settings = hub.settings(read_only_roots=(cache,))
        (path,) = await fetch(wanted, models, settings, ignore)
        assert path.read_bytes() == DATA
        assert path.is_relative_to(cache)
        assert hub.bytes_sent == len(DATA)
        assert is_empty(models)
        # The same bytes in a commit that the cache does not know.
        put(shelf, "README.md", b"more")
        newer = await resolve(REPO, settings)
        assert newer.revision != wanted.revision
        assert await fetch(newer, models, settings, ignore) == (path,)


async def test_a_volume_that_is_read_only_is_said(tmp_path: Path, shelf: Path) -> None:
    with running_hub(shelf) as hub, tmpfs(tmp_path / "ro", "ro") as folder:
        refused = pytest.raises(VolumeError, match=f"volume is read-only: {folder}")
        with refused:
            await fetch(await resolve(REPO, hub.settings()), folder, hub.settings(), ignore)


async def test_offline_nothing_is_asked(models: Path, shelf: Path) -> None:
    with running_hub(shelf) as hub:
        wanted = await resolve(REPO, hub.settings())
        asked = len(hub.requests())
        offline = hub.settings(offline=True)
        with pytest.raises(DownloadError, match=f"offline mode is on: {REPO}: missing: {NAME}"):
            await fetch(wanted, models, offline, ignore)
        with pytest.raises(DownloadError, match=f"offline mode is on: {REPO}"):
            await resolve(REPO, offline)
        assert len(hub.requests()) == asked
        await fetch(wanted, models, hub.settings(), ignore)
        (models / FOLDER / "snapshots" / wanted.revision / NAME).unlink()
        (path,) = await fetch(wanted, models, offline, ignore)  # the blob is there, a link is no download
    assert path.read_bytes() == DATA


@pytest.mark.skipif(not IS_ROOT, reason="only root can run as another user")
def test_the_folder_that_refuses_is_named_and_not_the_volume(tmp_path: Path, shelf: Path) -> None:
    """An older client of another user left this folder, without the right to write for its group."""
    data = tmp_path / "data"
    for folder in (data, data / "models"):
        folder.mkdir()
        folder.chmod(0o775)
    for name in ("profiles", "cache", "secrets"):
        (data / name).mkdir()
        (data / name).chmod(0o775)
    repo = RepoFolder(root=data / "models", name=FOLDER)
    repo.make()
    repo.blobs.chmod(0o755)
    with running_hub(shelf) as hub:
        code, _, err = ended(hub, data, "pull", REPO, user=1234)
    assert code == 50
    assert f"volume is not writable by user 1234, group 0: {repo.blobs} belongs to 0:0" in err


@pytest.mark.skipif(not IS_ROOT, reason="only root can run as another user")
def test_another_user_of_group_0_goes_on(tmp_path: Path, shelf: Path) -> None:
    """Every container may run as another user. The second finishes what the first left, and a third replaces it."""
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o775)
    path = partial(data / "models")
    with running_hub(shelf, *SLOW, str(tmp_path / "hurry")) as hub:
        with begin(hub, data, "pull", REPO, user=1234) as program:
            until(lambda: size_of(path) > MIB, "1 MiB")
            program.kill()
            program.communicate()
        (tmp_path / "hurry").touch()
        left = size_of(path)
        code, _, err = ended(hub, data, "pull", REPO, user=5678)
        assert code == 0, err
        assert hub.requests(host="cdn")[-1]["range"] == f"bytes={left}-"
        put(shelf, NAME, gguf_bytes(MIB, seed=9))
        code, out, err = ended(hub, data, "update", user=4321)
        assert code == 0, err
    assert "fetched and checked" in out
    modes = {oct(path.stat().st_mode & 0o7777) for path in (data / "models").rglob("*") if path.is_dir()}
    assert modes == {"0o2775"}
    assert {oct(path.stat().st_mode & 0o777) for path in (data / "models").rglob("*") if path.is_file()} == {"0o664"}


async def test_nothing_is_written_through_a_link_or_over_a_file(shelf: Path, models: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (models / FOLDER).symlink_to(theirs)
    with running_hub(shelf) as hub:
        wanted = await resolve(REPO, hub.settings())
        with pytest.raises(VolumeError, match="cache folder is a link"):
            await fetch(wanted, models, hub.settings(), lambda _: None)
        assert list(theirs.iterdir()) == []
        (models / FOLDER).unlink()
        (models / FOLDER).write_text("somebody's")
        with pytest.raises(VolumeError):
            await fetch(wanted, models, hub.settings(), lambda _: None)
    assert (models / FOLDER).read_text() == "somebody's"
