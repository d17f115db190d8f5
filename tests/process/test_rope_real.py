"""A context above the native length on the real engine: with the plan's flags it is there, without them it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.engine import find_model
from tests.process.stages.slots import RefusedError, serving, words
from tests.shapes import SMALL, write_gguf

NATIVE = 8192  # of SmolLM2
LONG = words(7_600)  # some 8,600 tokens


async def test_a_prompt_longer_than_native_is_answered() -> None:
    async with serving(find_model(), ctx_size=str(2 * NATIVE), rope_scaling="yarn", parallel="1") as server:
        turn = await server.talk().say(LONG, tokens=16)
    assert turn.prompt > NATIVE
    assert len(turn.text.split()) > 3


async def test_the_engine_gives_no_more_than_native_without_it(tmp_path: Path) -> None:
    """What the plan's refusal rests on: a larger --ctx-size alone is capped."""
    shape = SMALL["gqa"].changed(context_length=1024)
    model = write_gguf(tmp_path / "model.gguf", shape, with_data=True)  # a token is a byte
    flags: dict[str, Any] = {"ctx_size": "2048", "rope_scaling": "yarn", "parallel": "1"}
    async with serving(model, **flags) as server:
        assert (await server.talk().say(words(230))).prompt > 1024
    async with serving(model, change={"rope": None}, **flags) as server:
        with pytest.raises(RefusedError, match=r"context size \(1024 tokens\)"):
            await server.talk().say(words(230))
