from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.__main__ import main
from appliance.engines.vllm import facts as vllm_facts
from appliance.errors import ConfigError, EngineArgumentsError, EngineLibraryError
from appliance.image_facts import EngineFacts, dump_facts, parse_engine_facts
from appliance.serve.inputs import load_engine
from tests.builders import IMAGE

# As the wheel of 0.33.0 has it, shortened.
VERSION = """
version: str
__version__: str
commit_id: str | None

__version__ = version = '0.33.0'
__version_tuple__ = version_tuple = (0, 33, 0)

__commit_id__ = commit_id = 'g4ba787ec9'
"""
FACTS = EngineFacts(version="0.33.0", build=0, commit="4ba787ec9", flags=(), kv_types=())


def test_version_and_commit_are_those_of_the_wheel() -> None:
    assert vllm_facts.parse_version(VERSION) == FACTS


@pytest.mark.parametrize("text", ["", "__version__ = version = '0.33.0'\n__commit_id__ = commit_id = None\n"])
def test_a_wheel_that_does_not_say_what_it_is_is_40(text: str) -> None:
    with pytest.raises(EngineArgumentsError, match="names no version or no commit") as caught:
        vllm_facts.parse_version(text)
    assert caught.value.exit_code == 40


def test_the_verb_reads_the_wheel_beside_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "lib/vllm").mkdir(parents=True)
    (tmp_path / "lib/vllm/_version.py").write_text(VERSION)
    out = tmp_path / "facts.json"
    assert main(["engine-facts", "--bin", str(tmp_path / "bin/vllm"), "--out", str(out)]) == 0
    assert parse_engine_facts(out.read_text()) == FACTS


def test_a_launcher_without_its_wheel_is_44(tmp_path: Path) -> None:
    with pytest.raises(EngineLibraryError, match=r"lib/vllm/_version\.py: No such file") as caught:
        vllm_facts.read_facts(tmp_path / "bin/vllm", "")
    assert caught.value.exit_code == 44


def test_an_image_whose_engine_is_not_served_says_so_with_10() -> None:
    image = replace(IMAGE, engine="odd", engine_version="0.33.0", cell="odd-cu130")
    with pytest.raises(ConfigError, match=r"cannot be served yet: odd 0\.33\.0 \(odd-cu130\)") as caught:
        load_engine(image)
    assert caught.value.exit_code == 10
    assert caught.value.hint == "use an image of llama, vllm: python -m images select"
    assert load_engine(IMAGE).name == "llama"


def test_serve_and_plan_end_with_10_before_they_look_for_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = replace(IMAGE, engine="odd", engine_version="0.33.0", cell="odd-cu130")
    (tmp_path / "image_facts.json").write_text(dump_facts(image))
    (tmp_path / "engine_facts.json").write_text(dump_facts(FACTS))
    folders = ("--facts-dir", str(tmp_path), "--data-dir", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    assert main(["version", *folders]) == 0
    for verb in ("plan", "serve"):
        assert main([verb, *folders]) == 10
        assert "the engine of this image cannot be served yet: odd 0.33.0" in capsys.readouterr().err
