"""The abilities of models on the real engine: with random weights, rows that need no judgement pass."""

from __future__ import annotations

from pathlib import Path

from tests.process.stages.engine import find_model
from tests.process.stages.real import listed, real_home
from tests.process.test_abilities import QUICK, TEMPLATES, all_rows
from tests.shapes import SMALL, write_gguf

SURE = ("tool_forced", "tool_named", "tool_nested", "tool_special", "tool_history", "reasoning_off", "structured",
        "structured_reasoning")  # fmt: skip
CHOSEN = ("tool_free", "tool_results")  # which random weights say nothing of


def test_random_weights_pass_all_that_needs_no_judgement(tmp_path: Path) -> None:
    home = real_home(tmp_path / "home")
    shape = SMALL["gqa"].changed(block_count=1)
    write_gguf(home.data / "models/model.gguf", shape, quantization="Q8_0", with_data=True)
    template = str(TEMPLATES / "qwen3.jinja")
    settings = {"chat_template_file": template, "ctx_size": "4096", "threads": "1", "parallel": "1"}
    assert home.command("tune", beside=None, budget_s="5", **settings).returncode == 0
    with home.serving(**QUICK, **settings) as serving:
        serving.wait_ready()
        found = {name: row["result"] for name, row in all_rows(serving).items()}
        assert listed(serving)["abilities"] == found
    assert {found[name] for name in SURE} == {"passed"}, found
    assert {found[name] for name in CHOSEN} == {"not judged"}
    words = home.command("plan", beside=None, **QUICK, **settings).stdout
    assert "abilities of this model here: " in words


def test_the_demo_model_has_no_tools(tmp_path: Path) -> None:
    demo = find_model()
    home = real_home(tmp_path / "home")
    (home.data / "models/demo.gguf").symlink_to(demo)
    settings = {"ctx_size": "4096", "parallel": "1"}
    assert home.command("tune", beside=None, budget_s="5", **settings).returncode == 0
    with home.serving(**QUICK, **settings) as serving:
        serving.wait_ready()
        found = {name: row["result"] for name, row in all_rows(serving).items()}
    assert found.pop("structured") == "passed"
    assert {*found.values()} == {"not offered"}
