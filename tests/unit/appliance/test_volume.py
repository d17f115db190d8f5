from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.errors import ConfigError, DownloadError, ModelUnreadableError, VolumeError
from appliance.volume import add_model, drop_unfinished, open_volume, read_key, read_or_make_key
from tests.mounts import tmpfs

ROOT = Path(__file__).parents[3]
STRANGER = 12345
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)  # whole: a header that announces nothing
PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    open_volume(tmp_path, "b1")
    return tmp_path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "size=256k") as folder:
        yield folder


def test_its_folders_are_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    open_volume(tmp_path, "b1")
    open_volume(tmp_path, "b1")
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert names == {"models", "profiles", "cache", "cache/b1", "cache/b1/home", "secrets"}


def test_a_folder_that_is_not_there_is_no_volume(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="volume is not there") as caught:
        open_volume(tmp_path / "data")
    assert caught.value.exit_code == 50
    assert "-v appliance:" in (caught.value.hint or "")
    assert not (tmp_path / "data").exists()


def test_a_file_in_the_place_of_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("")
    with pytest.raises(VolumeError, match=r"volume cannot be written: .*models: file exists"):
        open_volume(tmp_path)


def test_a_read_only_mount_is_said(tmp_path: Path) -> None:
    with (
        tmpfs(tmp_path / "ro", "ro,size=64k") as folder,
        pytest.raises(VolumeError, match="volume is read-only") as caught,
    ):
        open_volume(folder)
    assert "without `:ro`" in (caught.value.hint or "")


def test_a_full_disk_is_said_and_the_probe_is_gone(small_disk: Path) -> None:
    open_volume(small_disk)
    fill(small_disk / "ballast")
    with pytest.raises(VolumeError, match="volume is full") as caught:
        open_volume(small_disk)
    assert caught.value.exit_code == 50
    assert list((small_disk / "cache").iterdir()) == []


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            return


# Everything is imported before the change of user: the interpreter itself may lie where only root gets to.
PRELUDE = """
import io, locale, os, shutil, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from appliance.__main__ import main
from appliance.errors import VolumeError
from appliance.volume import add_model, open_volume, read_or_make_key
volume = Path(sys.argv[3])
os.umask(0o022)
os.setgroups([])
os.setgid(0)
os.setuid(int(sys.argv[2]))
"""
OPEN = """
try:
    open_volume(volume, "b1")
    print("open")
except VolumeError as error:
    print(error.exit_code, error.message, "|", error.hint)
"""


def as_stranger(code: str, volume: Path, *, uid: int = STRANGER) -> subprocess.CompletedProcess[str]:
    """Runs `code` as a user who owns nothing, of group 0 as in a container; root alone can become one."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    argv = [sys.executable, "-B", "-c", PRELUDE + code, str(ROOT), str(uid), str(volume)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A folder of root's that others can get to: pytest's own are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="volume", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_volume_of_somebody_else_names_both(foreign: Path) -> None:
    said = as_stranger(OPEN, foreign).stdout
    assert said.startswith(f"50 volume is not writable by user {STRANGER}, group 0: {foreign} belongs to 0:0")
    assert "--user ANY:0" in said


def test_a_volume_in_a_closed_folder_is_refused_in_words(foreign: Path) -> None:
    (foreign / "data").mkdir()
    foreign.chmod(0o700)
    said = as_stranger(OPEN, foreign / "data").stdout
    assert said.startswith(f"50 volume is not writable by user {STRANGER}, group 0")
    assert "lies in a folder that may not be entered" in said


def test_any_user_of_group_0_opens_a_volume_of_mode_0775(foreign: Path) -> None:
    foreign.chmod(0o775)
    assert as_stranger(OPEN, foreign).stdout == "open\n"


@pytest.mark.thorough
def test_what_one_user_of_group_0_made_another_can_use(foreign: Path) -> None:
    """The command line sets the umask: a folder of mode 0755 would be closed to the next container's user."""
    foreign.chmod(0o775)
    first = as_stranger('sys.exit(main(["key", "--data-dir", str(volume)]))', foreign)
    assert first.returncode == 0, first.stderr
    use = OPEN + "print(read_or_make_key(volume / 'secrets/api_key'))\n"
    use += f"print(add_model(volume / 'models', 'a.gguf', io.BytesIO({GGUF!r}), None).split(':')[0])"
    second = as_stranger(use, foreign, uid=54321)
    assert second.stdout.split() == ["open", first.stdout.strip(), "a.gguf"], second.stderr
    assert stat.S_IMODE((foreign / "secrets/api_key").stat().st_mode) == 0o640


def test_the_key_is_made_once_and_kept_from_others(volume: Path) -> None:
    path = volume / "secrets/api_key"
    key = read_or_make_key(path)
    assert key.startswith("sk-")
    assert len(key) > 40
    assert read_or_make_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_text() == key + "\n"
    assert [p.name for p in path.parent.iterdir() if p.suffix != ".lock"] == ["api_key"]


def test_the_key_is_read_without_writing(volume: Path) -> None:
    path = volume / "secrets/api_key"
    assert read_key(path) == ""
    assert list(path.parent.iterdir()) == []
    assert read_or_make_key(path) == read_key(path)
    with pytest.raises(VolumeError, match=r"API key cannot be read: .*not a directory"):
        read_key(path / "api_key")


def test_two_volumes_have_two_keys(tmp_path: Path) -> None:
    keys = set()
    for name in "ab":
        (tmp_path / name).mkdir()
        open_volume(tmp_path / name)
        keys.add(read_or_make_key(tmp_path / name / "secrets/api_key"))
    assert len(keys) == 2


def test_an_empty_key_file_is_replaced_and_one_of_the_users_own_is_kept(volume: Path) -> None:
    path = volume / "secrets/api_key"
    path.write_text(" \n")
    assert read_or_make_key(path).startswith("sk-")
    path.write_text("  my own \n")
    assert read_or_make_key(path) == "my own"


def test_a_key_that_is_no_text_or_cannot_be_kept_is_said(volume: Path) -> None:
    path = volume / "secrets/api_key"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(VolumeError, match="API key is not text"):
        read_or_make_key(path)
    with pytest.raises(VolumeError, match="API key cannot be stored on the volume") as caught:
        read_or_make_key(volume / "nowhere/api_key")
    assert "APPLIANCE_AUTH=off" in (caught.value.hint or "")


def test_an_empty_key_file_that_cannot_be_replaced_is_said_to_be_empty(volume: Path) -> None:
    path = volume / "secrets/api_key"
    path.touch()
    (volume / "secrets/.api_key.lock").mkdir()  # as where a secret is mounted: nothing can be made beside it
    with pytest.raises(VolumeError, match=f"API key file is empty: {path}") as caught:
        read_or_make_key(path)
    assert "Secret" in (caught.value.hint or "")


def test_a_key_that_is_a_pipe_is_not_waited_for(volume: Path) -> None:
    os.mkfifo(volume / "api_key")
    for read in (read_key, read_or_make_key):
        with pytest.raises(VolumeError, match="it is not a regular file"):
            read(volume / "api_key")


RACE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from appliance.volume import read_or_make_key
print("ready", flush=True)
for line in sys.stdin:
    print(read_or_make_key(Path(line.strip())), flush=True)
"""


@pytest.mark.parametrize("begin", [lambda path: None, lambda path: path.write_text("")], ids=["missing", "empty"])
@pytest.mark.thorough
def test_two_processes_that_race_agree_on_one_key(volume: Path, begin: Callable[[Path], None]) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-B", "-c", RACE, str(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        for racer in racers:
            assert racer.stdout
            assert racer.stdout.readline() == "ready\n"
        for turn in range(100):
            path = volume / f"secrets/key{turn}"
            begin(path)
            for racer in racers:
                assert racer.stdin
                racer.stdin.write(f"{path}\n")
                racer.stdin.flush()
            said = {racer.stdout.readline() for racer in racers if racer.stdout}
            assert said == {path.read_text()}
    finally:
        for racer in racers:
            racer.communicate(timeout=20)


def test_a_model_is_streamed_in_and_reported(volume: Path) -> None:
    data = GGUF + os.urandom(3 * 2**20 + 17)
    sha256 = hashlib.sha256(data).hexdigest()
    said = add_model(volume / "models", "a.gguf", io.BytesIO(data), sha256.upper())
    assert said == f"a.gguf: {len(data):,} bytes, sha256 {sha256}"
    assert (volume / "models/a.gguf").read_bytes() == data
    assert [path.name for path in (volume / "models").iterdir()] == ["a.gguf"]


def test_another_sha256_keeps_what_was_there(volume: Path) -> None:
    add_model(volume / "models", "a.gguf", io.BytesIO(GGUF), None)
    with pytest.raises(DownloadError, match=r"model has another sha256 than expected: a\.gguf") as caught:
        add_model(volume / "models", "a.gguf", io.BytesIO(b"new"), "0" * 64)
    assert caught.value.exit_code == 32
    assert (volume / "models/a.gguf").read_bytes() == GGUF
    assert [path.name for path in (volume / "models").iterdir()] == ["a.gguf"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "model is unreadable: a.gguf: the input was empty"),
        (PNG, "model is unreadable: a.gguf: at byte 0: expected the letters GGUF, found a PNG image"),
        (
            GGUF[:20],
            "model is unreadable: a.gguf: at byte 16: expected a key count, found the end of the file at byte 20",
        ),
    ],
    ids=["empty", "png", "cut"],
)
def test_what_is_no_model_keeps_what_was_there(volume: Path, data: bytes, words: str) -> None:
    add_model(volume / "models", "a.gguf", io.BytesIO(GGUF), None)
    with pytest.raises(ModelUnreadableError) as caught:
        add_model(volume / "models", "a.gguf", io.BytesIO(data), None)
    assert caught.value.message == words
    assert ("docker exec -i CONTAINER appliance models add a.gguf" in (caught.value.hint or "")) == (not data)
    assert (volume / "models/a.gguf").read_bytes() == GGUF
    assert [path.name for path in (volume / "models").iterdir()] == ["a.gguf"]


def test_one_part_of_a_split_model_can_be_added(volume: Path) -> None:
    """Later parts have no architecture and are no model by themselves."""
    key = b"split.no"
    part = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, 1)
    add_model(volume / "models", "a-00002-of-00002.gguf", io.BytesIO(part), None)
    assert (volume / "models/a-00002-of-00002.gguf").read_bytes() == part


def test_a_model_that_has_the_sha256_already_is_kept_unread(volume: Path) -> None:
    sha256 = hashlib.sha256(GGUF).hexdigest()
    add_model(volume / "models", "a.gguf", io.BytesIO(GGUF), sha256)
    source = io.BytesIO(b"something else")
    assert (
        add_model(volume / "models", "a.gguf", source, sha256.upper()) == f"a.gguf: is there already, sha256 {sha256}"
    )
    assert source.tell() == 0
    (volume / "models/a.gguf").write_bytes(GGUF[:20])  # as an interrupted copy left it
    assert add_model(volume / "models", "a.gguf", io.BytesIO(GGUF), sha256).startswith("a.gguf: 24 bytes")
    assert (volume / "models/a.gguf").read_bytes() == GGUF


def test_leftovers_are_dropped_and_a_part_in_use_and_other_files_stay(volume: Path) -> None:
    models = volume / "models"
    names = [".a.gguf.0123456789abcdef.part", ".a.gguf.part", ".b.part", "a.gguf.0123456789abcdef.part"]
    for name in names:
        (models / name).write_bytes(b"x")
    seen: list[str] = []

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            drop_unfinished(models)
            seen.extend(path.name for path in models.iterdir())
            return super().read(size)

    add_model(models, "new.gguf", Slow(GGUF), None)
    assert any(name.startswith(".new.gguf.") for name in seen)
    assert sorted(path.name for path in models.iterdir()) == sorted([*names[1:], "new.gguf"])
    drop_unfinished(volume / "nowhere")


class Broken(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            raise OSError(5, "Input/output error")
        return super().read(size)


def test_a_stream_that_breaks_keeps_what_was_there(volume: Path) -> None:
    add_model(volume / "models", "a.gguf", io.BytesIO(GGUF), None)
    with pytest.raises(VolumeError, match="input/output error"):
        add_model(volume / "models", "a.gguf", Broken(b"x" * 2**21), None)
    assert (volume / "models/a.gguf").read_bytes() == GGUF
    assert [path.name for path in (volume / "models").iterdir()] == ["a.gguf"]


def test_a_model_that_is_larger_than_the_disk_is_said_and_leaves_nothing(small_disk: Path) -> None:
    open_volume(small_disk)
    with pytest.raises(VolumeError, match="volume is full"):
        add_model(small_disk / "models", "a.gguf", io.BytesIO(b"x" * 2**20), None)
    assert list((small_disk / "models").iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["../x.gguf", ".hidden.gguf", "a/b.gguf", "/etc/x.gguf", "x.bin", "x", "", "..", ".gguf", "x.gguf/", "x.gguf\n"],
)
def test_hostile_names_are_refused(volume: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a file name for a model"):
        add_model(volume / "models", name, io.BytesIO(b"x"), None)
    assert list((volume / "models").iterdir()) == []
    assert not (volume / "x.gguf").exists()
