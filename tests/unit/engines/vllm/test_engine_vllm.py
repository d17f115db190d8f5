from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.__main__ import main
from appliance.engines.engine import Install
from appliance.engines.vllm.planning.arguments.engine_args import read_pins
from appliance.engines.vllm.process import facts as vllm_facts
from appliance.errors import ConfigError, EngineArgumentsError, EngineLibraryError
from appliance.image_facts import EngineFacts, dump_facts, parse_engine_facts
from appliance.settings import resolve_settings
from appliance.start.image import load_engine
from tests.builders import IMAGE

ROOT = Path(__file__).parents[4]
SAID = ROOT / "appliance/engines/vllm/cells/vllm-cpu.json"  # of the image vllm-cpu
SAID_FOR_CUDA = SAID.with_name("vllm-cu130.json")  # of the image vllm-cu130, built without a GPU
FACTS = EngineFacts(version="0.33.0", build=0, commit="4ba787ec9", flags=(), kv_types=())


def recorded() -> dict[str, Any]:
    """Return the recorded facts without the entries that introspect.py does not write."""
    document: dict[str, Any] = json.loads(SAID.read_text("utf-8"))
    for name in ("schema", "build", "kv_pairs", "backends", "split_modes", "cpu_variants"):
        del document[name]
    return document


def pretend(folder: Path, script: str) -> Path:
    """A launcher with a Python beside it that does as `script` says. `$2` is where the answer goes."""
    folder.mkdir(parents=True)
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return folder / "vllm"


def test_what_the_cpu_build_says_of_itself_is_read_whole() -> None:
    facts = vllm_facts.parse_facts(json.dumps(recorded()))
    assert facts == parse_engine_facts(SAID.read_text("utf-8"))
    assert (facts.version, facts.commit) == ("0.32.0", "")
    assert {"--uds", "--kv-cache-memory-bytes", "--max-num-seqs", "--speculative-config"} <= set(facts.flags)
    assert facts.choices_of("--dtype") == ("auto", "bfloat16", "float", "float16", "float32", "half")
    assert set(facts.choices_of("--kv-cache-dtype")) == set(facts.kv_types)
    assert facts.choices_of("--uds") == ()


def test_quantizations_and_attention_have_their_chips() -> None:
    facts = parse_engine_facts(SAID.read_text("utf-8"))
    lowest = {each.name: each.lowest_sm for each in facts.quantizations}
    assert (lowest["gptq"], lowest["awq"], lowest["fp8"], lowest["mxfp4"]) == ("60", "75", "75", "80")
    backends = {each.name: each for each in facts.attention}
    assert "75" in (backends["TRITON_ATTN"].sms or ())
    assert "75" not in (backends["FLASH_ATTN"].sms or ())
    assert backends["CPU_ATTN"].sms == ()
    assert backends["FLASHINFER"].sms is None, "its library is not in the CPU build, so nothing is said of it"
    assert not [name for name in backends if name.startswith(("ROCM_", "XPU_"))]
    assert {"hermes", "qwen3_coder"} <= set(facts.tool_parsers)
    assert {"qwen3", "deepseek_r1"} <= set(facts.reasoning_parsers)


def test_the_pages_example_of_a_cache_on_disk_is_passed_on() -> None:
    page = (ROOT / "docs/several-models.md").read_text("utf-8")
    (example,) = (block for block in page.split("```yaml\n")[1:] if block.startswith("engine_arg"))
    settings = resolve_settings({}, {}, example.partition("```")[0])
    flag, config = read_pins(settings, parse_engine_facts(SAID_FOR_CUDA.read_text("utf-8"))).passed
    assert flag == "--kv-transfer-config"
    assert json.loads(config)["kv_connector"] == "OffloadingConnector"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flags": []}, "names none of: flags"),
        ({"attention": []}, "names none of: attention"),
        ({"version": ""}, "names none of: version"),
        ({"version": 32}, "is not understood: EngineFacts"),
        ({"unheard": 1}, "is not understood: EngineFacts"),
    ],
)
def test_an_answer_that_is_not_understood_is_40(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineArgumentsError, match=message) as caught:
        vllm_facts.parse_facts(json.dumps({**recorded(), **change}))
    assert caught.value.exit_code == 40


def test_the_verb_asks_the_python_beside_the_launcher(tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    said.write_text(json.dumps(recorded()))
    binary = pretend(
        tmp_path / "bin", f'[ "${{1##*/}}" = introspect.py ] && cp {said} "$2" && echo INFO a line of its log'
    )
    out = tmp_path / "facts.json"
    assert main(["engine-facts", "--bin", str(binary), "--out", str(out)]) == 0
    assert out.read_text("utf-8") == SAID.read_text("utf-8")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo 'ImportError: libnuma.so.1: cannot open shared object file' >&2; exit 1",
            r"exit code 1: .*libnuma\.so\.1",
        ),
        ("exit 0", "exit code 0"),
    ],
)
def test_a_python_that_cannot_import_vllm_is_44(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(EngineLibraryError, match=message) as caught:
        vllm_facts.read_facts(pretend(tmp_path / "bin", script), "")
    assert caught.value.exit_code == 44


def test_a_build_s_stand_in_is_found_and_a_user_s_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise doctor would load libraries from a folder of the volume, which a start does not do."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/run/driver")
    binary = pretend(tmp_path / "bin", 'echo "at ${LD_LIBRARY_PATH-nothing}" >&2; exit 1')
    with pytest.raises(EngineLibraryError, match="at /run/driver"):
        vllm_facts.read_facts(binary, "")
    install = Install(engine_dir=binary.parents[1], facts=FACTS, cache_dir=tmp_path)
    engine = load_engine(replace(IMAGE, engine="vllm"))
    for installed, said in ((install, "nothing"), (replace(install, driver_dir=Path("/usr/lib/wsl/lib")), "/usr/lib/")):
        with pytest.raises(EngineLibraryError, match=f"at {said}"):
            engine.query_installed(installed)


def test_a_launcher_without_its_python_is_44(tmp_path: Path) -> None:
    with pytest.raises(EngineLibraryError, match=r"cannot be run: .*/bin/python: .*No such file") as caught:
        vllm_facts.read_facts(tmp_path / "bin/vllm", "")
    assert caught.value.exit_code == 44


def test_pairs_of_kv_types_are_no_business_of_this_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineArgumentsError, match="no pairs of KV types: q8_0-q8_0"):
        vllm_facts.read_facts(tmp_path / "bin/vllm", "q8_0-q8_0")


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


def test_what_0_33_takes_differently_is_known() -> None:
    old = parse_engine_facts(SAID.read_text("utf-8"))
    new = parse_engine_facts(SAID_FOR_CUDA.read_text("utf-8"))
    assert (new.version, new.commit) == ("0.33.0", "4ba787ec9")
    # `--no-enable-x` is listed as `--disable-x`, and the other way round.
    turned = {flag for flag in old.flags if flag.startswith(("--no-enable-", "--no-disable-"))}
    assert set(old.flags) - set(new.flags) == turned
    assert "--disable-prefix-caching" in set(new.flags) - set(old.flags)
    # Any KV type is parsed; the configuration refuses it later, so the types themselves are what a plan goes by.
    assert (bool(old.choices_of("--kv-cache-dtype")), new.choices_of("--kv-cache-dtype")) == (True, ())
    assert set(old.kv_types) < set(new.kv_types)
    assert [(each.name, each.lowest_sm) for each in old.quantizations] == [
        (each.name, each.lowest_sm) for each in new.quantizations
    ]
