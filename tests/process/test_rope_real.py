"""A context above the native length on the real engine: with the plan's flags it is there, without them it is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from appliance.engines.llama.planning.arguments.launch import LlamaLaunch
from tests.process.stages.engine import find_model
from tests.process.stages.slots import RefusedError, serving, words
from tests.shapes import SMALL, write_gguf

NATIVE = 1024  # as the file says, so that the prompt is read in seconds; SmolLM2's own is 8192
LONG = words(1_100)  # some 1,250 tokens


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """The demo's weights in a file that names a shorter native length."""
    path = shutil.copyfile(find_model(), tmp_path / "short.gguf")
    length = gguf.GGUFReader(path, "r+").get_field("llama.context_length")
    assert length
    assert length.contents() == 8192
    length.parts[-1][0] = NATIVE
    return path


async def test_a_prompt_longer_than_native_is_answered(short: Path) -> None:
    async with serving(short, ctx_size=str(2 * NATIVE), rope_scaling="yarn", parallel="1") as server:
        launch = server.plan.launch
        assert isinstance(launch, LlamaLaunch)
        assert launch.rope is not None, "the native length is the file's"
        turn = await server.talk().say(LONG, tokens=16)
    assert turn.prompt > NATIVE
    assert len(turn.text.split()) > 3


async def test_the_engine_gives_no_more_than_native_without_it(tmp_path: Path) -> None:
    """The engine caps a larger --ctx-size, which is why the plan refuses it."""
    shape = SMALL["gqa"].changed(context_length=1024)
    model = write_gguf(tmp_path / "model.gguf", shape, with_data=True)  # a token is a byte
    flags: dict[str, Any] = {"ctx_size": "2048", "rope_scaling": "yarn", "parallel": "1"}
    async with serving(model, **flags) as server:
        assert (await server.talk().say(words(230))).prompt > 1024
    async with serving(model, change={"rope": None}, **flags) as server:
        with pytest.raises(RefusedError, match=r"context size \(1024 tokens\)"):
            await server.talk().say(words(230))
