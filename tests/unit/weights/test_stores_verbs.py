"""`appliance models list | rm | verify | import`: output, changes, and refusals."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.__main__ import main
from appliance.image_facts import Recipe, RecipeFile, Rung, dump_recipe
from appliance.values import dataclass
from appliance.volume import hold_files
from appliance.weights.cache.size import as_size
from appliance.weights.show import Counted
from appliance.weights.stores import transfer
from tests.mounts import tmpfs
from tests.unit.model.gguf_files import write_model
from tests.unit.weights.cache_files import OTHER_COMMIT, put_cached, put_ollama


@dataclass(frozen=True, kw_only=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Said]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "models").mkdir(parents=True)
    return folder


@pytest.fixture
def models(data: Path) -> Path:
    return data / "models"


@pytest.fixture
def weights(tmp_path: Path) -> bytes:
    return write_model(tmp_path / "weights").read_bytes()


@pytest.fixture
def run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: str, folders: str = "none") -> Said:
        common = ["--data-dir", str(data), "--facts-dir", str(tmp_path / "facts"), "--model-dirs", folders]
        code = main(["models", *argv, *common])
        out, err = capsys.readouterr()
        return Said(code=code, out=out, err=err)

    return run


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


# list


def test_an_empty_volume(run: Run, models: Path) -> None:
    said = run("list")
    assert said.code == 0
    assert said.out.startswith(f"no models in {models}\nvolume: 0 models, 0 bytes; ")
    assert run("list", "--json").document["models"] == []


def test_the_list_names_what_serve_takes_with_place_size_and_state(
    run: Run, models: Path, tmp_path: Path, weights: bytes
) -> None:
    (models / "flat.gguf").write_bytes(weights)
    link = put_cached(models, "org/m", "m-Q4_K_M.gguf", weights + b"1")
    put_cached(models, "org/broken", "b.gguf", b"GGUF").resolve().unlink()
    (link.parents[2] / "blobs" / f"{'c' * 64}.incomplete").write_bytes(bytes(2048))
    (models / f".half.gguf.{'0' * 16}.part").write_bytes(b"12")
    (models / "old.gguf.damaged").write_bytes(b"123")
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", weights)
    document = run("list", "--json", folders=str(tmp_path / "ollama")).document
    rows = {(row["name"], row["tool"]): (row["bytes"], row["state"], row["missing"]) for row in document["models"]}
    assert rows == {
        ("flat.gguf", "volume"): (len(weights), "complete", None),
        ("org/m/m-Q4_K_M.gguf", "volume"): (len(weights) + 1, "complete", None),
        ("org/broken/b.gguf", "volume"): (0, "partial", "its blob is missing"),
        ("org/m", "volume"): (2048, "partial", "download not finished: 2.0 kB"),
        ("half.gguf", "volume"): (2, "partial", "download not finished: 2 bytes"),
        ("old.gguf.damaged", "volume"): (3, "partial", "damaged, set aside: 3 bytes"),
        ("qwen3:4b", "Ollama"): (len(weights), "complete", None),
    }
    assert document["volume_bytes"] == sum(size for (_, tool), (size, _, _) in rows.items() if tool == "volume")
    assert document["free_bytes"] > 0
    text = run("list", folders=str(tmp_path / "ollama")).out
    assert "qwen3:4b" in text
    assert "volume: 6 models" in text


def test_the_list_says_which_profile_uses_a_model(run: Run, models: Path, data: Path, weights: bytes) -> None:
    (models / "m.gguf").write_bytes(weights)
    (data / "profiles").mkdir()
    for name, text in (
        ("a1" * 12, json.dumps({"plan": {"model_path": str(models / "m.gguf")}})),
        ("b2" * 12, json.dumps({"plan": {"model_path": "/data/models/gone.gguf"}})),
        ("c3" * 12, "{"),
        ("d4" * 12, '{"plan": 7}'),
    ):
        (data / "profiles" / f"{name}.json").write_text(text)
    assert run("list", "--json").document["models"][0]["profiles"] == ["a1" * 12]
    assert "  a1a1a1a1  complete" in run("list").out


@pytest.mark.thorough
def test_a_folder_that_cannot_be_listed_whole_is_said_and_the_rest_is_shown(
    run: Run, models: Path, tmp_path: Path, weights: bytes
) -> None:
    (models / "m.gguf").write_bytes(weights)
    (tmp_path / "many").mkdir()
    for number in range(50_001):
        os.mknod(tmp_path / f"many/f{number:06}")
    said = run("list", folders=str(tmp_path / "many"))
    assert said.code == 0
    assert "m.gguf" in said.out
    assert f"folder {tmp_path}/many: only the first 50,000 files and folders were listed" in said.out


def test_no_name_is_printed_raw(run: Run, models: Path, weights: bytes) -> None:
    put_cached(models, "org/m", "e\x1b[2J\n.gguf", weights)
    (models / "b\udcff.gguf").write_bytes(weights)
    for argv in (["list"], ["list", "--json"], ["verify"], ["rm", "b\udcff.gguf"], ["rm", "org/m"]):
        said = run(*argv)
        assert said.code == 0
        assert "\x1b" not in said.out + said.err
        assert (said.out + said.err).isascii()


# rm


@pytest.mark.parametrize("word", ["rm", "remove"])
def test_a_file_is_removed(run: Run, models: Path, word: str) -> None:
    (models / "a.gguf").write_bytes(b"GGUF")
    said = run(word, "a.gguf")
    assert (said.code, said.out) == (0, "a.gguf: removed, 4 bytes freed\n")
    assert names_in(models) == set()
    said = run(word, "a.gguf")
    assert said.code == 10
    assert "no such model on the volume: a.gguf" in said.err


def test_all_parts_of_a_split_file_are_removed_and_a_later_one_alone_by_its_own_name(run: Run, models: Path) -> None:
    for number in (1, 2, 3):
        (models / f"m-0000{number}-of-00003.gguf").write_bytes(b"GGUF")
    (models / "mmproj-m.gguf").write_bytes(b"GGUF")
    assert run("rm", "m-00003-of-00003.gguf").code == 0
    assert run("rm", "m").code == 0
    assert names_in(models) == {"mmproj-m.gguf"}
    assert run("rm", "mmproj-m.gguf").code == 0


def test_a_folder_of_safetensors_goes_and_the_gguf_file_in_it_stays(run: Run, models: Path) -> None:
    for name in ("config.json", "model.safetensors", "q4.gguf"):
        (models / "org/Qwen").mkdir(parents=True, exist_ok=True)
        (models / "org/Qwen" / name).write_bytes(b"{}")
    assert run("rm", "org/Qwen").code == 0
    assert names_in(models) == {"org/Qwen/q4.gguf"}
    assert run("rm", "q4").code == 0
    assert list(models.iterdir()) == []


def test_of_a_repository_a_file_goes_with_its_blob_and_what_is_shared_stays(run: Run, models: Path) -> None:
    put_cached(models, "org/m", "m-Q4_K_M.gguf", b"GGUF4")
    put_cached(models, "org/m", "m-Q8_0.gguf", b"GGUF8")
    put_cached(models, "org/m", "copy-of-Q4.gguf", b"GGUF4", commit=OTHER_COMMIT)
    said = run("rm", "org/m:Q4_K_M", "--json")
    assert said.document["freed_bytes"] == 0  # another file has the same blob
    assert run("rm", "org/m:Q8_0", "--json").document["freed_bytes"] == 5
    assert names_in(models / "models--org--m/blobs") == {sha256(b"GGUF4")}
    assert run("rm", "org/m/copy-of-Q4.gguf", "--json").document["freed_bytes"] == 5
    assert not (models / "models--org--m").exists()


def test_with_the_last_model_of_a_repository_its_projector_goes(run: Run, models: Path) -> None:
    for commit in ("a" * 40, OTHER_COMMIT):
        put_cached(models, "org/m", "m-Q4_K_M.gguf", b"GGUF4", commit=commit)
        put_cached(models, "org/m", "m-mmproj-F16.gguf", b"GGUFp", commit=commit)
    put_cached(models, "org/m", "m-Q8_0.gguf", b"GGUF8")
    assert run("rm", "org/m:Q8_0", "--json").document["freed_bytes"] == 5
    assert sha256(b"GGUFp") in names_in(models / "models--org--m/blobs")
    assert run("rm", "org/m:Q4_K_M", "--json").document["freed_bytes"] == 10
    assert not (models / "models--org--m").exists()


def test_a_projector_that_is_served_stays_with_its_model(run: Run, models: Path) -> None:
    put_cached(models, "org/m", "m.gguf", b"GGUFm")
    held = hold_files([put_cached(models, "org/m", "mmproj-F16.gguf", b"GGUFp")])
    before = names_in(models)
    said = run("rm", "org/m/m.gguf")
    for handle in held:
        os.close(handle)
    assert (said.code, "model is being served, or written" in said.err) == (10, True)
    assert names_in(models) == before


def test_a_blob_that_no_file_leads_to_is_listed(run: Run, models: Path) -> None:
    link = put_cached(models, "org/m", "m.gguf", b"GGUF")
    (link.parents[2] / "blobs" / ("d" * 64)).write_bytes(bytes(2048))
    rows = run("list", "--json").document["models"]
    assert [(row["name"], row["bytes"], row["missing"]) for row in rows if row["missing"]] == [
        ("org/m", 2048, "no file links to it: 2.0 kB")
    ]
    assert run("rm", "org/m").code == 0
    assert run("list", "--json").document["models"] == []


def test_a_ref_goes_with_its_snapshot(run: Run, models: Path) -> None:
    put_cached(models, "org/m", "a.gguf", b"GGUFa", ref="old")
    put_cached(models, "org/m", "b.gguf", b"GGUFb", commit=OTHER_COMMIT)
    assert run("rm", "org/m/a").code == 0
    assert names_in(models / "models--org--m/refs") == {"main"}


def test_a_whole_repository_goes_with_all_that_was_fetched_of_it(run: Run, models: Path) -> None:
    link = put_cached(models, "org/m", "m.gguf", b"GGUF")
    put_cached(models, "org/m", "README.md", b"words")
    (link.parents[2] / "blobs/x.incomplete").write_bytes(b"123")
    assert run("rm", "org/m", "--json").document["freed_bytes"] == len("GGUF" + "words" + "123" + "a" * 40)
    assert names_in(models) <= {path for path in names_in(models) if path.startswith(".locks/")}


def test_a_repository_that_is_being_fetched_is_left_alone(run: Run, models: Path) -> None:
    put_cached(models, "org/m", "m.gguf", b"GGUF")
    before = names_in(models)
    with next((models / ".locks/models--org--m").glob("*.lock")).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = run("rm", "org/m")
    assert said.code == 50
    assert "model is being fetched: org/m" in said.err
    assert names_in(models) == before


def test_the_last_file_goes_while_another_is_fetched_and_the_folder_stays_for_it(run: Run, models: Path) -> None:
    put_cached(models, "org/m", "m.gguf", b"GGUF")
    blob = models / "models--org--m/blobs" / sha256(b"other")
    blob.write_bytes(b"other")  # it has just come, and is linked next
    lock = models / f".locks/models--org--m/{blob.name}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run("rm", "org/m/m.gguf").code == 0
    assert names_in(models / "models--org--m") == {f"blobs/{blob.name}"}


@pytest.mark.parametrize("name", ["flat.gguf", "org/m:Q4", "org/m", "m"])
def test_a_model_that_is_served_is_left_alone(run: Run, models: Path, name: str) -> None:
    (models / "flat.gguf").write_bytes(b"GGUF")
    link = put_cached(models, "org/m", "m-Q4.gguf", b"GGUFm")
    for number in (1, 2):
        (models / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    before = names_in(models)
    handles = hold_files([models / "flat.gguf", link, models / "m-00002-of-00002.gguf"])
    try:
        said = run("rm", name)
        assert said.code == 10
        assert f"model is being served, or written: {'m-00001-of-00002.gguf' if name == 'm' else name[:5]}" in said.err
        assert names_in(models) == before
    finally:
        for handle in handles:
            os.close(handle)
    assert run("rm", name).code == 0


def test_a_name_that_means_two_removes_none(run: Run, models: Path) -> None:
    for org in ("a", "b"):
        put_cached(models, f"{org}/m", "m.gguf", b"GGUF")
    said = run("rm", "m")
    assert said.code == 10
    assert "model name m matches 2 models on the volume\n  a/m/m.gguf\n  b/m/m.gguf" in said.err


def test_nothing_is_removed_from_another_tools_folder(run: Run, tmp_path: Path) -> None:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", b"GGUF")
    said = run("rm", "qwen3:4b", folders=str(tmp_path / "ollama"))
    assert said.code == 10
    assert f"model is in Ollama's folder {tmp_path}/ollama, which is read-only for the appliance: qwen3:4b" in said.err


def test_nothing_is_changed_where_a_link_leads_out_of_the_volume(
    run: Run, models: Path, tmp_path: Path, weights: bytes
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/m.gguf").write_bytes(weights[: len(weights) // 2])
    (models / "org").symlink_to(tmp_path / "out")
    (models / "linked.gguf").symlink_to(tmp_path / "out/m.gguf")
    said = run("rm", "org/m.gguf")
    assert said.code == 10
    assert "model is behind a link on the volume: org/m.gguf" in said.err
    assert run("verify", "org/m.gguf", "--repair").code == 32
    assert run("rm", "linked.gguf").code == 0
    assert names_in(models) == set()
    assert (tmp_path / "out/m.gguf").exists()


def test_nothing_is_removed_behind_a_repository_or_a_snapshot_that_is_a_link(
    run: Run, models: Path, tmp_path: Path
) -> None:
    theirs = put_cached(tmp_path / "hf", "org/m", "m.gguf")
    (models / "models--org--m").symlink_to(tmp_path / "hf/models--org--m")
    for name in ("org/m/m.gguf", "org/m"):
        said = run("rm", name)
        assert said.code in (10, 50)
        assert theirs.read_bytes() == b"GGUF"
    (models / "models--org--m").unlink()
    (models / "models--org--s/snapshots").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/s.gguf").write_bytes(b"GGUF")
    (models / "models--org--s/snapshots/main").symlink_to(tmp_path / "outside")
    assert run("rm", "org/s/s.gguf").code == 10
    assert (tmp_path / "outside/s.gguf").exists()


@pytest.mark.parametrize("name", ["../x.gguf", "/etc/hostname", "models--org--m", "..", "a\0b", "x" * 5000, "blobs"])
def test_what_is_no_name_of_a_model_is_refused(run: Run, models: Path, name: str) -> None:
    put_cached(models, "org/m", "m.gguf", b"GGUF")
    (models.parent / "x.gguf").write_bytes(b"GGUF")
    before = names_in(models.parent)
    assert run("rm", name).code == 10
    assert names_in(models.parent) == before


def test_a_folder_of_a_repository_is_known_by_its_name(run: Run, models: Path, weights: bytes) -> None:
    for name in ("R-Q4_K_M.gguf", "R-Q8_0.gguf"):
        (models / "org/R-GGUF").mkdir(parents=True, exist_ok=True)
        (models / "org/R-GGUF" / name).write_bytes(weights)
    assert "org/R-GGUF/R-Q8_0.gguf: R-Q8_0.gguf: readable" in run("verify", "org/r-gguf:Q8_0").out
    assert "matches 2 models on the volume" in run("rm", "org/R-GGUF").err
    assert run("rm", "org/R-GGUF:Q4_K_M").code == 0
    assert run("rm", "org/R-GGUF").code == 0
    assert list(models.iterdir()) == []


# verify


def test_every_blob_is_hashed_anew(run: Run, models: Path, weights: bytes) -> None:
    put_cached(models, "org/m", "m.gguf", weights)
    said = run("verify")
    assert (said.code, said.out) == (0, f"org/m/m.gguf: m.gguf: sound, sha256 {sha256(weights)}\n")


def test_a_small_file_is_named_by_gits_hash(run: Run, models: Path) -> None:
    put_cached(models, "org/m", "model.safetensors", b"weights")
    link = put_cached(models, "org/m", "config.json", b"{}")
    by_git = hashlib.sha1(b"blob 2\0{}").hexdigest()
    link.resolve().rename(link.resolve().with_name(by_git))
    link.unlink()
    link.symlink_to(f"../../blobs/{by_git}")
    assert run("verify", "org/m").code == 0
    (link.parents[2] / "blobs" / by_git).write_bytes(b"[]")
    assert run("verify", "org/m").code == 32


def test_damage_is_said_and_set_aside_only_when_asked(run: Run, models: Path, weights: bytes) -> None:
    sound = put_cached(models, "org/sound", "s.gguf", weights)
    link = put_cached(models, "org/m", "m.gguf", weights + b"1")
    blob = link.resolve()
    blob.write_bytes(weights + b"2")
    said = run("verify")
    assert said.code == 32
    assert f"org/m/m.gguf: m.gguf: damaged: its hash is {sha256(weights + b'2')}, expected {blob.name}" in said.out
    assert f"s.gguf: sound, sha256 {sha256(weights)}" in said.out
    assert "1 of 2 files are damaged" in said.err
    assert "`models verify --repair` sets it aside; then fetch it again: `appliance models pull" in said.err
    assert blob.exists()
    assert run("verify", "--repair").code == 32
    assert (blob.exists(), link.is_symlink()) == (False, False)
    assert blob.with_name(f"{blob.name}.damaged").exists()
    assert sound.exists()
    assert run("verify").code == 0
    assert run("rm", "org/m").code == 0


def test_what_is_no_file_or_leads_nowhere_is_no_model(run: Run, models: Path, weights: bytes) -> None:
    """No verb waits for a pipe, and none of these files is called complete."""
    os.mkfifo(models / "pipe.gguf")
    (models / "link.gguf").symlink_to("gone.gguf")
    (models / "m-00001-of-00003.gguf").write_bytes(weights)
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (models / "Qwen").mkdir(exist_ok=True)
        (models / "Qwen" / name).write_bytes(b"{}")
    missing = {row["name"]: row["missing"] for row in run("list", "--json").document["models"]}
    assert missing == {
        "pipe.gguf": "it is not a file: pipe.gguf",
        "link.gguf": "it is a dead link",
        "m-00001-of-00003.gguf": "2 of its 3 parts are missing, the first of them m-00002-of-00003.gguf",
        "Qwen": "model-00002-of-00002.safetensors is missing",
    }
    said = run("verify")
    assert (said.code, said.out.count("damaged: ")) == (32, 4)
    for name in missing:
        assert run("rm", name).code == 0
    assert list(models.iterdir()) == []


def test_garbage_in_a_ref(run: Run, models: Path, weights: bytes) -> None:
    for number, text in enumerate((b"\0\xff", b"x" * 5000, b"../../..", b"")):
        link = put_cached(models, f"org/m{number}", "m.gguf", weights)
        (link.parents[2] / "refs/main").write_bytes(text)
        assert run("verify", f"org/m{number}").code == 0
        assert run("rm", f"org/m{number}/m.gguf").code == 0
    assert not list(models.glob("models--*"))


def test_what_is_not_whole_is_damage(run: Run, models: Path) -> None:
    put_cached(models, "org/m", "m.gguf", b"GGUF").resolve().unlink()
    said = run("verify", "--json", "--repair")
    assert said.code == 32
    (row,) = said.document
    assert (row["state"], row["reason"]) == ("damaged", "its blob is missing")


def test_of_a_plain_file_the_recipe_knows_the_hash_or_the_header_has_to_do(
    run: Run, models: Path, tmp_path: Path, weights: bytes
) -> None:
    (models / "m.gguf").write_bytes(weights)
    said = run("verify")
    assert (said.code, "readable, sha256" in said.out) == (0, True)
    (tmp_path / "facts").mkdir()
    file = RecipeFile(path="m.gguf", bytes=len(weights), sha256=sha256(weights))
    nothing: dict[str, Any] = dict.fromkeys(("repo", "revision", "url", "loss", "loss_source", "shape"))
    sizes: dict[str, Any] = {"parameters_b": 1.0, "active_b": 1.0}
    rung = Rung(name="m", tier="balanced", format="gguf", files=(file,), source="here", **nothing, **sizes)
    words: dict[str, Any] = dict.fromkeys(("reasoning", "tools", "speculation", "projector"))
    recipe = Recipe(name="r", license="MIT", rungs=(rung,), default="m", chat={}, **words)
    (tmp_path / "facts/recipe.json").write_text(dump_recipe(recipe))
    assert "m.gguf: sound" in run("verify", "m").out
    (models / "m.gguf").write_bytes(weights[:-8] + b"\0" * 7 + b"1")
    assert "its hash is" in run("verify", "m").out
    (models / "cut.gguf").write_bytes(weights[: len(weights) // 2])
    said = run("verify", "cut", "--repair")
    assert said.code == 32
    assert names_in(models) == {"m.gguf", "cut.gguf.damaged"}


def test_a_file_of_a_recipes_name_elsewhere_is_the_users_own(run: Run, models: Path, tmp_path: Path) -> None:
    (tmp_path / "facts").mkdir()
    file = RecipeFile(path="config.json", bytes=2, sha256="a" * 64)
    nothing: dict[str, Any] = dict.fromkeys(("url", "loss", "loss_source", "shape"))
    place: dict[str, Any] = {"repo": "org/m", "revision": "c" * 40, "parameters_b": 1.0, "active_b": 1.0}
    rung = Rung(name="m", tier="balanced", format="safetensors", files=(file,), source="here", **place, **nothing)
    words: dict[str, Any] = dict.fromkeys(("reasoning", "tools", "speculation", "projector"))
    recipe = Recipe(name="r", license="MIT", rungs=(rung,), default="m", chat={}, **words)
    (tmp_path / "facts/recipe.json").write_text(dump_recipe(recipe))
    (models / "mine").mkdir()
    for name in ("config.json", "model.safetensors"):
        (models / "mine" / name).write_bytes(b"{}")
    assert run("verify", "--repair").code == 0
    assert {"config.json", "model.safetensors"} <= names_in(models / "mine")


def test_what_may_not_be_read_is_not_damaged_and_stays(run: Run, models: Path, weights: bytes) -> None:
    blob = put_cached(models, "org/m", "m.gguf", weights).resolve()
    blob.chmod(0)
    said = run("verify", "--repair")
    if os.access(blob, os.R_OK):
        pytest.skip("root may read everything")
    assert (said.code, "not checked: it is not readable" in said.out) == (30, True)
    assert blob.exists()


def test_what_is_served_is_not_set_aside(run: Run, models: Path, weights: bytes) -> None:
    link = put_cached(models, "org/m", "m.gguf", weights)
    link.resolve().write_bytes(weights[:-1] + b"x")
    held = hold_files([link.resolve()])
    said = run("verify", "--repair")
    for handle in held:
        os.close(handle)
    assert (said.code, "because it is being served" in said.err) == (32, True)
    assert link.exists()


def test_a_model_of_another_tool_is_verified_by_name_and_never_set_aside(run: Run, tmp_path: Path) -> None:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", b"GGUF1")
    folder = str(tmp_path / "ollama")
    assert run("verify", folders=folder).out.startswith("no models in")
    assert f"sound, sha256 {sha256(b'GGUF1')}" in run("verify", "qwen3:4b", folders=folder).out
    (tmp_path / "ollama/blobs" / f"sha256-{sha256(b'GGUF1')}").write_bytes(b"GGUF2")
    before = names_in(tmp_path / "ollama")
    assert run("verify", "qwen3:4b", "--repair", folders=folder).code == 32
    assert names_in(tmp_path / "ollama") == before


def test_a_damaged_projector_is_damage(run: Run, tmp_path: Path) -> None:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", b"GGUF1", b"GGUF projector")
    folder = str(tmp_path / "ollama")
    blob = f"sha256-{sha256(b'GGUF projector')}"
    assert run("verify", "qwen3:4b", folders=folder).out.count(": sound, ") == 2
    (tmp_path / "ollama/blobs" / blob).write_bytes(b"GGUF projectoR")
    said = run("verify", "qwen3:4b", "--json", folders=folder)
    rows = {Path(row["file"]).name: row["state"] for row in said.document}
    assert (said.code, rows.pop(blob), set(rows.values())) == (32, "damaged", {"sound"})


def test_a_name_that_nothing_has(run: Run) -> None:
    said = run("verify", "nothing")
    assert (said.code, "no such model: nothing" in said.err) == (10, True)


# import


def test_a_model_of_ollama_becomes_a_file_of_its_name(run: Run, models: Path, tmp_path: Path, weights: bytes) -> None:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", weights, b"GGUF projector")
    said = run("import", "qwen3:4b", "--json", folders=str(tmp_path / "ollama"))
    assert said.code == 0, said.err
    assert names_in(models) == {"qwen3-4b.gguf", "mmproj-qwen3-4b.gguf"}
    row = next(row for row in said.document if row["file"].endswith("/qwen3-4b.gguf"))
    assert (row["bytes"], row["sha256"]) == (len(weights), sha256(weights))
    assert row["how"] in {"copied", "linked", "shares its blocks"}
    again = run("import", "qwen3:4b", "--json", folders=str(tmp_path / "ollama"))
    assert {row["how"] for row in again.document} == {"is there already"}


def test_a_file_is_linked_where_every_user_may_read_it_and_copied_where_not(
    run: Run, models: Path, tmp_path: Path, weights: bytes
) -> None:
    for name, mode in (("open.gguf", 0o644), ("closed.gguf", 0o600)):
        (tmp_path / name).write_bytes(weights)
        (tmp_path / name).chmod(mode)
        assert run("import", str(tmp_path / name)).code == 0
        assert (models / name).read_bytes() == weights
    assert (models / "closed.gguf").stat().st_ino != (tmp_path / "closed.gguf").stat().st_ino
    assert (models / "closed.gguf").stat().st_mode & 0o060 == 0o060
    assert (models / "open.gguf").stat().st_mode & 0o040


def test_a_model_of_the_hubs_cache_keeps_its_names(run: Run, models: Path, tmp_path: Path, weights: bytes) -> None:
    put_cached(tmp_path / "hub", "org/m", "m-Q4_K_M.gguf", weights)
    put_cached(tmp_path / "hub", "org/m", "mmproj-F16.gguf", weights + b"p")
    assert run("import", "org/m:Q4_K_M", folders=str(tmp_path / "hub")).code == 0
    shutil.rmtree(tmp_path / "hub")
    (row,) = run("list", "--json").document["models"]
    assert row["name"] == "org/m/m-Q4_K_M.gguf"
    assert run("verify", "org/m").code == 0
    repo = models / "models--org--m"
    assert names_in(repo / "blobs") == {sha256(weights), sha256(weights + b"p")}
    assert (repo / "refs/main").read_text() == "a" * 40


def test_the_branch_stands_where_it_stood_in_the_cache_that_a_model_came_from(
    run: Run, models: Path, tmp_path: Path, weights: bytes
) -> None:
    put_cached(tmp_path / "hub", "org/m", "old.gguf", weights)
    put_cached(tmp_path / "hub", "org/m", "new.gguf", weights, commit=OTHER_COMMIT)
    for name in ("old", "new", "old"):
        assert run("import", f"org/m/{name}", folders=str(tmp_path / "hub")).code == 0
        wanted = "a" * 40 if not (models / "models--org--m/snapshots" / OTHER_COMMIT).exists() else OTHER_COMMIT
        assert (models / "models--org--m/refs/main").read_text() == wanted


def test_a_split_file_and_a_folder_come_whole(run: Run, models: Path, tmp_path: Path, weights: bytes) -> None:
    (tmp_path / "many").mkdir()
    for number in (1, 2):
        (tmp_path / f"many/m-0000{number}-of-00002.gguf").write_bytes(weights)
    (tmp_path / "many/other.gguf").write_bytes(weights)
    (tmp_path / "Qwen").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "Qwen" / name).write_bytes(b"{}")
    assert run("import", str(tmp_path / "many/m-00001-of-00002.gguf")).code == 0
    assert names_in(models) == {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}
    assert run("import", str(tmp_path / "many")).code == 0
    assert run("import", str(tmp_path / "Qwen")).code == 0
    assert {"other.gguf", "Qwen/config.json", "Qwen/model.safetensors"} < names_in(models)


def test_a_damaged_blob_is_not_brought(run: Run, models: Path, tmp_path: Path, weights: bytes) -> None:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", weights)
    blob = tmp_path / "ollama/blobs" / f"sha256-{sha256(weights)}"
    blob.write_bytes(weights[:-1] + b"1")
    said = run("import", "qwen3:4b", folders=str(tmp_path / "ollama"))
    assert said.code == 32
    assert f"sha256 {sha256(weights[:-1] + b'1')}, expected {sha256(weights)}" in said.err
    assert names_in(models) == set()


def test_a_sha256_that_was_given_counts(run: Run, models: Path, tmp_path: Path, weights: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(weights)
    said = run("import", str(tmp_path / "m.gguf"), "--sha256", "0" * 64)
    assert said.code == 32
    assert f"sha256 {sha256(weights)}, expected {'0' * 64}" in said.err
    assert names_in(models) == set()
    assert run("import", str(tmp_path / "m.gguf"), "--sha256", sha256(weights).upper()).code == 0
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(weights)
    assert run("import", str(tmp_path / "two"), "--sha256", sha256(weights)).code == 2


def test_another_file_of_that_name_is_kept(run: Run, models: Path, tmp_path: Path, weights: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(weights)
    (models / "m.gguf").write_bytes(b"mine")
    said = run("import", str(tmp_path / "m.gguf"))
    assert said.code == 10
    assert "another file of this name is on the volume: m.gguf" in said.err
    assert (models / "m.gguf").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("request_text", "code", "words"),
    [
        ("oci://ghcr.io/org/m:q4", 10, "`appliance models pull NAME` fetches a model"),
        ("ghcr.io/org/m:q4", 10, "write oci://ghcr.io/org/m:q4"),
        ("nothing", 10, "no file and no model in mounted folders has this name: nothing"),
        ("/etc/hostname", 30, "no model found at: /etc/hostname"),
        ("a\0b", 10, "no file and no model"),
    ],
)
def test_what_cannot_be_imported_is_said(run: Run, request_text: str, code: int, words: str) -> None:
    said = run("import", request_text)
    assert said.code == code
    assert words in said.err


def test_a_file_that_is_no_model_is_refused_before_anything_is_written(
    run: Run, models: Path, tmp_path: Path, weights: bytes
) -> None:
    (tmp_path / "cut.gguf").write_bytes(weights[: len(weights) // 2])
    said = run("import", str(tmp_path / "cut.gguf"))
    assert said.code == 30
    assert names_in(models) == set()


def test_room_is_checked_before_a_copy(run: Run, data: Path, tmp_path: Path, weights: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(weights)
    shutil.rmtree(data)
    with tmpfs(data, "size=32m"):
        (data / "models").mkdir()
        said = run("import", str(tmp_path / "m.gguf"))
        assert said.code == 50
        assert "volume has too little free space: m needs" in said.err
        assert "33.6 MB free" in said.err or "33.5 MB free" in said.err
        assert names_in(data / "models") == set()


@pytest.mark.parametrize("action", ["add", "rm", "remove", "import"])
def test_an_action_without_its_name(run: Run, action: str) -> None:
    said = run(action)
    assert said.code == 2
    assert f"for example `appliance models {action}" in said.err


# the meter


class Terminal:
    """A stream that is, or is not, a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.text = ""
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_reading_tells_share_rate_and_time_left(is_terminal: bool) -> None:
    seconds = 0.0
    stream = Terminal(is_terminal=is_terminal)
    counted = Counted("verifying", 400 * 10**6, stream, lambda: seconds)  # type: ignore[arg-type]
    for seconds in (5.0, 10.0):  # noqa: B007 - the clock
        counted(50 * 10**6)
    counted.end()
    line = "verifying: 100.0 MB of 400.0 MB, 10.0 MB/s, 30 s left"
    written = "".join(f"\r{each}\x1b[K" for each in ("verifying: 0 bytes of 400.0 MB", line))
    assert stream.text == (f"{written}\r\x1b[K" if is_terminal else f"{line}\n")


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (2048, "2.0 kB"), (639_400_000, "639.4 MB"), (5_030_000_000, "5.03 GB"),
     (2 * 10**15, "2,000.00 TB")],
)  # fmt: skip
def test_sizes(count: int, words: str) -> None:
    assert as_size(count) == words


def test_blocks_are_shared_where_the_disk_can(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"GGUF" * 4096)
    with (tmp_path / "b").open("wb") as file:
        shares = transfer.clone(tmp_path / "a", file)
    done = subprocess.run(
        ["cp", "--reflink=always", str(tmp_path / "a"), str(tmp_path / "c")], capture_output=True, check=False
    )
    assert shares == (done.returncode == 0)
    assert (tmp_path / "b").read_bytes() == ((tmp_path / "a").read_bytes() if shares else b"")
