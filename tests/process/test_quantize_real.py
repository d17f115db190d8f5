"""The demo model in F16 with the real engine: quantized while idle, measured, served by the next start, removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.stages.boot import Home
from tests.process.stages.engine import find_engine, find_model
from tests.process.stages.real import listed, post, real_home, write_f16


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    find_engine("llama-quantize")
    return write_f16(find_model(), tmp_path_factory.mktemp("f16") / "demo-f16.gguf")


@pytest.fixture
def home(tmp_path: Path, unquantized: Path) -> Home:
    home = real_home(tmp_path)
    (home.data / "models/demo-f16.gguf").symlink_to(unquantized)
    return home


def made(home: Home) -> list[Path]:
    return sorted((home.data / "models/.quantized").rglob("*.gguf"))


def test_it_is_made_while_idle_and_served_by_the_next_start(home: Home) -> None:
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        assert listed(serving)["quantization"] == "F16"
        assert serving.event("quantization")["type"] == "Q8_0"
        assert serving.event("quantized")["type"] == "Q8_0"
        loss = serving.event("quantized_loss")["message"]
        assert "over 4,096 tokens" in loss
        document = serving.document("status")["quantization"]
        assert (document["type"], document["is_served"]) == ("Q8_0", False)
        assert abs(document["file"]["loss"]["difference"]) < 0.02  # Q8_0 loses less than 2 %
        assert 0 < document["file"]["loss"]["standard_error"] < 0.02
        assert serving.chat()[0] == 200
        serving.terminate()
    (path,) = made(home)
    before = path.stat().st_mtime_ns
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        model = listed(serving)
        assert (model["id"], model["quantization"]) == ("demo-f16", "Q8_0")
        assert "made by an earlier start" in serving.event("quantization")["message"]
        body = {"model": "demo-f16", "prompt": "The capital of France is", "max_tokens": 4}
        assert post(serving, "/v1/completions", body)[0] == 200
        refused = home.command("models", "rm", "demo-f16.gguf")
        assert refused.returncode == 10, refused.stderr
        assert "is being served" in refused.stderr
        serving.terminate()
    assert path.stat().st_mtime_ns == before
    rows = json.loads(home.command("models", "list", "--json").stdout)["models"]
    (row,) = (row for row in rows if row["quantized"])
    assert (row["name"], row["quantized"]["kind"]) == ("demo-f16-Q8_0.gguf", "Q8_0")
    assert row["quantized"]["loss"]["tokens"] == 4096
    assert "Q8_0 of demo-f16.gguf" in home.command("models", "list").stdout
    planned = home.command("plan")
    assert "perplexity" in planned.stdout, planned.stderr
    assert home.command("models", "rm", "demo-f16-Q8_0").returncode == 0
    assert not made(home)
    assert (home.data / "models/demo-f16.gguf").exists()
