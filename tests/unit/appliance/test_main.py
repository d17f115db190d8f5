from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from appliance import __version__
from appliance.__main__ import HOST_VERBS, VERBS, main
from appliance.image_facts import dump_facts
from appliance.settings import PREFIX, SETTINGS
from tests.builders import ENGINE, IMAGE
from tests.mounts import tmpfs

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0" * 200


@dataclass(kw_only=True)
class Said:
    code: int
    out: str
    err: str


class House:
    """A volume, facts of an image, and the command line."""

    def __init__(self, root: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.data = root / "data"
        self.models = self.data / "models"
        self.models.mkdir(parents=True)
        self.facts = root / "facts"
        self.facts.mkdir()
        (self.facts / "image_facts.json").write_text(dump_facts(IMAGE))
        (self.facts / "engine_facts.json").write_text(dump_facts(ENGINE))
        self._capture = capture

    def run(self, verb: str, *words: str) -> Said:
        """Run a verb with this volume and these facts."""
        return self.bare(verb, "--data-dir", str(self.data), "--facts-dir", str(self.facts), *words)

    def bare(self, *words: str) -> Said:
        code = main(list(words))
        out, err = self._capture.readouterr()
        return Said(code=code, out=out, err=err)

    def captured(self) -> Any:
        return self._capture.readouterr()

    def add(self, name: str, *, layers: int = 2, context: int = 512) -> Path:
        return write_gguf(self.models / name, layers=layers, context=context)


def write_gguf(path: Path, *, layers: int, context: int, width: int = 64) -> Path:
    """A small model of zeros, by the `gguf` package."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_token_list([f"token{number}" for number in range(100)])
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((100, width), dtype=np.float32))
    writer.add_tensor(f"blk.{layers - 1}.attn_norm.weight", np.zeros(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def house(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    umask = os.umask(0o022)
    yield House(tmp_path, capsys)
    os.umask(umask)


@pytest.mark.parametrize("verb", ["serve", "plan", "tune", "probe", "models", "version", "health"])
def test_a_misspelt_flag_names_its_near_miss(house: House, verb: str) -> None:
    said = house.run(verb, "--ctx-sise", "4096")
    assert said.code == 2
    assert said.err == "error: unknown argument: --ctx-sise\n\nhint: perhaps you meant '--ctx-size'\n"


def test_a_flag_that_is_like_nothing_points_to_the_help(house: House) -> None:
    said = house.run("plan", "--xyzzy=1")
    assert said.code == 2
    assert "hint: see `appliance --help`" in said.err


def test_a_flag_of_another_verb_is_refused(house: House) -> None:
    said = house.run("serve", "--dry-run")
    assert said.code == 2
    assert "unknown argument: --dry-run" in said.err


def test_flags_are_not_guessed_from_their_beginnings(house: House) -> None:
    assert house.run("plan", "--ctx", "4096").code == 2


@pytest.mark.parametrize("words", [("srve",), (), ("models", "ad", "x.gguf"), ("plan", "--ctx-size")])
def test_wrong_words_are_usage(house: House, words: tuple[str, ...]) -> None:
    said = house.bare(*words)
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert "--help" in said.err


def test_flags_without_a_verb_are_those_of_serve(house: House) -> None:
    """Images of other engines are started in this way: `docker run IMAGE --ctx-size 2048`."""
    own = ("--data-dir", str(house.data), "--facts-dir", str(house.facts))
    assert house.bare("--ctx-size", "2048", *own).err == house.run("serve", "--ctx-size", "2048").err
    assert "none is on the volume" in house.bare("--ctx-size", "2048", *own).err
    said = house.bare("--ctx-sise", "2048")
    assert (said.code, said.err) == (2, "error: unknown argument: --ctx-sise\n\nhint: perhaps you meant '--ctx-size'\n")
    assert house.bare("--ctx-size", "x", *own).code == 10


@pytest.mark.parametrize("words", [("--ctx-size", "2048", "plan"), ("--ctx-size=2048", "plan"), ("--json", "plan")])
def test_a_verb_behind_flags_is_told_to_come_first(house: House, words: tuple[str, ...]) -> None:
    said = house.bare(*words)
    assert (said.code, said.err.splitlines()[0]) == (2, "error: verb stands behind flags: plan")
    assert "appliance plan …" in said.err
    assert "verb" not in house.bare("--model", "plan", "--facts-dir", str(house.facts)).err, "a model of that name"


def test_help_and_version_come_without_a_verb(house: House) -> None:
    for words in (("--help",), ("-h",)):
        with pytest.raises(SystemExit) as ended:
            house.bare(*words)
        assert ended.value.code == 0
        assert "usage: appliance [-h] VERB" in house.captured().out
    own = ("--facts-dir", str(house.facts))  # without facts of an image it asks Docker, as on the host
    assert house.bare("--version", *own).out == house.bare("version", *own).out
    assert json.loads(house.bare("--version", "--json", *own).out)["appliance"] == __version__


def test_all_verbs_are_known_by_name(house: House) -> None:
    """A word behind flags is compared with the same verbs that `--help` lists."""
    said = house.bare("srve").err
    assert re.findall(r"'([\w-]+)'", said.partition("choose from ")[2].partition(")")[0]) == [*VERBS, *HOST_VERBS]


def test_an_unknown_verb_is_named_with_the_known(house: House) -> None:
    said = house.bare("srve")
    assert "'srve'" in said.err
    assert "serve" in said.err


@pytest.mark.parametrize("verb", ["serve", "plan", "tune", "models"])
def test_help_shows_what_people_set_and_help_all_the_rest(house: House, verb: str) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as caught:
            house.bare(verb, flag)
        assert caught.value.code == 0
        shown[flag] = set(re.findall(r"(?m)^  (--[a-z-]+)", house.captured().out))
    flags = {setting.flag for setting in SETTINGS.values()}
    assert shown["--help-all"] >= flags
    assert shown["--help"] & flags == {setting.flag for setting in SETTINGS.values() if not setting.is_rare}
    assert len(shown["--help"] & flags) == 30
    assert {"--ctx-size", "--users", "--parallel", "--mode"} <= shown["--help"]
    assert not {"--engine-dir", "--numa", "--threads", "--hf-cache"} & shown["--help"]


@pytest.mark.parametrize("word", ["--numa", "--node-rank"])
def test_a_flag_that_help_leaves_out_is_taken_and_its_near_miss_named(house: House, word: str) -> None:
    assert f"setting {word[2:].replace('-', '_')} is" in house.bare("plan", word, "much").err
    assert f"perhaps you meant '{word}'" in house.bare("plan", f"{word}x", "much").err


def test_several_hosts_are_not_measured(house: House) -> None:
    said = house.bare("tune", "--nodes", "2")
    assert said.code == 10
    assert "error: several hosts cannot be measured: nodes is 2 (flag --nodes)" in said.err
    assert "hint: measure on a host that serves alone; a group serves the predicted plan" in said.err


def test_people_and_requests_are_told_apart(house: House) -> None:
    with pytest.raises(SystemExit):
        house.bare("serve", "--help")
    out = " ".join(house.captured().out.split())
    assert "--users N people who use the model at the same time; --parallel sets the requests themselves" in out
    assert "--parallel N requests served at the same time: an expert's override of --users" in out


def test_a_context_of_ten_is_refused_with_its_bounds(house: House) -> None:
    house.add("a.gguf")
    said = house.run("plan", "--ctx-size", "10")
    assert said.code == 10
    assert "ctx_size is outside 256 to 16777216: '10' (flag --ctx-size)" in said.err


def test_a_misspelt_variable_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_CTX_SZIE", "4096")
    said = house.run("plan")
    assert said.code == 10
    assert "perhaps you meant 'APPLIANCE_CTX_SIZE'" in said.err


def test_a_misspelt_line_of_the_file_is_refused(house: House) -> None:
    (house.data / "appliance.yaml").write_text("ctx_szie: 4096\n")
    said = house.run("plan")
    assert said.code == 10
    assert "perhaps you meant 'ctx_size'" in said.err


def test_without_a_model_it_says_where_to_put_one(house: House) -> None:
    said = house.run("plan")
    assert said.code == 10
    assert f"no model was named and none is on the volume: {house.models}" in said.err
    assert "put a .gguf file into" in said.err


def test_with_two_models_both_are_listed(house: House) -> None:
    paths = [house.add("a.gguf"), house.add("b.gguf")]
    said = house.run("plan")
    assert said.code == 10
    assert "2 are on the volume" in said.err
    assert all(str(path) in said.err for path in paths)
    assert house.run("plan", "b").code == 0  # as a word
    assert house.run("plan", "--model", "b.gguf").code == 0  # and as a flag


def test_a_misspelt_model_names_its_near_miss(house: House) -> None:
    house.add("smollm.gguf")
    said = house.run("plan", "smolm")
    assert said.code == 10
    assert "perhaps you meant smollm" in said.err


def test_a_folder_is_no_model(house: House) -> None:
    house.add("a.gguf")
    said = house.run("plan", str(house.models))
    assert said.code == 30
    assert f"model is a folder: {house.models}" in said.err
    assert "name the file itself" in said.err


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "byte 0"), (PNG, "byte 0"), (b"GGUF", "byte 4")], ids=["empty", "png", "only the magic"]
)
@pytest.mark.parametrize("verb", ["plan", "serve", "tune"])
def test_a_file_that_is_no_model_is_30_with_the_byte(house: House, verb: str, data: bytes, words: str) -> None:
    (house.models / "a.gguf").write_bytes(data)
    said = house.run(verb, "--log", "json")
    assert said.code == 30
    assert words in said.err
    assert "a.gguf" in said.err


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_model_that_was_cut_is_30_with_the_byte(house: House, share: float) -> None:
    path = house.add("a.gguf")
    os.truncate(path, int(path.stat().st_size * share))
    said = house.run("plan")
    assert said.code == 30
    assert "byte" in said.err
    assert str(path) in said.err


def test_a_model_that_is_larger_than_memory_is_31_with_figures(house: House) -> None:
    path = house.add("a.gguf")
    size = write_huge(path, gib=4096)
    said = house.run("plan")
    assert said.code == 31, said.err
    assert f"{size / 2**20:,.0f} weights" in said.err
    assert "--allow-disk" in said.err
    assert house.run("plan", "--allow-disk", "on").code == 0


def write_huge(path: Path, *, gib: int) -> int:
    """A model whose one matrix is `gib` GiB of hole: the file is sparse. Returns the size of its weights."""
    rows = gib * 2**30 // (64 * 4)
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 2),
        (writer.add_context_length, 512),
        (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 128),
        (writer.add_head_count, 8),
        (writer.add_head_count_kv, 2),
    ):
        add(value)
    writer.add_tensor_info("token_embd.weight", (rows, 64), np.dtype(np.float32), rows * 64 * 4)
    writer.add_tensor_info("blk.1.attn_norm.weight", (64,), np.dtype(np.float32), 64 * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 4096 + rows * 64 * 4)
    return rows * 64 * 4


def test_version_names_everything(house: House) -> None:
    said = house.run("version")
    assert said.code == 0
    assert f"appliance: {__version__}" in said.out
    assert "cell: llama-cpu" in said.out
    assert "engine: llama 0.5.0-dev (build 11312, commit 0c1e57098)" in said.out
    assert json.loads(house.run("version", "--json").out)["build_id"] == "b1"


def test_a_damaged_image_is_10(house: House) -> None:
    (house.facts / "engine_facts.json").write_text("{}")
    said = house.run("version")
    assert said.code == 10
    assert "the image is damaged" in said.err


def test_a_dry_run_prints_the_engines_command_line_and_nothing_else(house: House) -> None:
    path = house.add("my model.gguf", context=2048)
    said = house.run("plan", "--dry-run", "--threads", "1", "--ubatch", "128", "--engine-dir", "/opt/llama")
    argv = shlex.split(said.out)
    assert said.code == 0
    assert said.out.count("\n") == 1
    assert argv[0] == "/opt/llama/llama-server"
    assert argv[argv.index("--model") + 1] == str(path)
    assert argv[argv.index("--fit") + 1] == "off"
    assert argv[argv.index("--ctx-size") + 1] == "2048"
    assert argv[argv.index("--threads") + 1] == "1"
    assert argv[argv.index("--ubatch-size") + 1] == "128"


def test_the_json_plan_holds_reasons(house: House) -> None:
    house.add("a.gguf", context=4096)
    document: dict[str, Any] = json.loads(house.run("plan", "--json", "--threads", "1").out)
    assert document["plan"]["launch"]["ubatch"] == 512
    assert all(choice["reason"] and choice["source"] for choice in document["plan"]["choices"])
    assert document["argv"][0].endswith("llama-server")


def test_explain_shows_every_setting_with_its_source(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.add("a.gguf", context=4096)
    monkeypatch.setenv("APPLIANCE_PARALLEL", "2")
    said = house.run("plan", "--explain", "--threads", "1")
    assert said.code == 0
    assert all(f"\n  {name} " in said.out for name in SETTINGS)
    assert "2 [variable APPLIANCE_PARALLEL]" in said.out
    assert "1 [flag --threads]" in said.out
    assert "\na prediction; measuring decides between it and others that fit\n" in said.out


def test_arguments_for_the_engine_are_taken_though_they_begin_with_a_hyphen(house: House) -> None:
    house.add("a.gguf", context=4096)
    words = ("--engine-arg", "--top-k 20", "--engine-arg", "--no-warmup", "--engine-arg=--temp -1")
    said = house.run("plan", "--dry-run", *words)
    assert said.code == 0, said.err
    assert " --top-k 20 --no-warmup --temp -1 " in said.out
    assert "  --top-k 20 --no-warmup --temp -1 [flag --engine-arg]" in house.run("plan", *words).out
    assert house.run("plan", "--engine-arg").code == 2
    refused = house.run("plan", "--engine-arg", "--threads 2")
    assert refused.code == 10
    assert refused.err.endswith("hint: use --threads N\n")


@pytest.mark.parametrize("verb", ["plan", "serve"])
def test_what_is_named_and_missing_is_told_before_anything_is_fetched(house: House, verb: str) -> None:
    flags = ("--model", "org/far-away:Q4_K_M", "--offline", "on")
    said = house.run(verb, *flags, "--lora", "style")
    assert (said.code, "setting lora names no file: 'style' (flag --lora)" in said.err) == (10, True)
    said = house.run(verb, *flags, "--chat-template-file", "/none.jinja")
    assert (said.code, "setting chat_template_file cannot be read: '/none.jinja'" in said.err) == (10, True)


def test_probe_shows_what_may_be_used(house: House) -> None:
    document = json.loads(house.run("probe", "--json").out)
    assert document["cpu"]["threads_max"] >= 1
    assert document["memory"]["usable_mib"] > 0
    assert f"cpu.threads_max: {document['cpu']['threads_max']}\n" in house.run("probe").out


def test_profiles_of_an_empty_volume(house: House) -> None:
    said = house.run("profiles")
    assert (said.code, said.out) == (0, "")
    assert "no profiles in" in said.err
    assert house.run("profiles", "--json").out == "[]\n"


def test_models_are_listed_added_and_removed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert house.run("models").out.startswith(f"no models in {house.models}\nvolume: 0 models, 0 bytes; ")
    give(monkeypatch, house.add("source.gguf").read_bytes())
    house.run("models", "remove", "source.gguf")
    assert re.match(r"a\.gguf: [\d,]+ bytes, sha256 ", house.run("models", "add", "a.gguf").out)
    assert [row["name"] for row in json.loads(house.run("models", "list", "--json").out)["models"]] == ["a.gguf"]
    assert house.run("models", "remove", "a.gguf").out.startswith("a.gguf: removed, ")
    assert house.run("models", "remove", "a.gguf").code == 10
    assert house.run("models", "add").code == 2


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Give `data` on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_an_empty_input_is_30_and_keeps_the_model(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker exec` without -i gives an empty input."""
    path = house.add("a.gguf")
    before = path.read_bytes()
    give(monkeypatch, b"")
    said = house.run("models", "add", "a.gguf")
    assert said.code == 30
    assert "error: model is unreadable: a.gguf: the input was empty" in said.err
    assert "with -i" in said.err
    assert path.read_bytes() == before


def test_a_full_volume_still_removes_models_and_tells_its_key(
    tmp_path: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = house.add("a.gguf").read_bytes()
    with tmpfs(tmp_path / "disk", "size=256k") as disk:
        house.data = disk
        key = house.run("key").out
        leftover = disk / "models/.b.gguf.0123456789abcdef.part"
        (disk / "models/a.gguf").write_bytes(model)
        with leftover.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        assert house.run("key").out == key
        (disk / "secrets/api_key").rename(disk / "secrets/kept")
        assert house.run("key").code == 50
        assert house.run("models", "remove", "a.gguf").out.startswith("a.gguf: removed, ")
        give(monkeypatch, model)
        assert house.run("models", "add", "b.gguf").code == 0  # the leftover made room for it
        assert sorted(path.name for path in (disk / "models").iterdir()) == ["b.gguf"]


def test_the_key_verb_prints_the_key_of_the_volume(house: House) -> None:
    said = house.run("key")
    assert said.code == 0
    assert (house.data / "secrets/api_key").read_text() == said.out
    assert house.run("key").out == said.out


def test_the_key_verb_without_a_volume_is_50(house: House) -> None:
    assert house.bare("key", "--data-dir", str(house.data / "no")).code == 50


def test_health_of_nothing_is_1(house: House) -> None:
    said = house.run("health", "--port", "1")
    assert said.code == 1
    assert "no answer on port 1" in said.err
