"""A check of KV types: how it ends against a program of known differences, and what the real engine says."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from engine_stage import COPIED, find_engine
from supervisor_harness import eventually

from appliance.command import Command
from appliance.engines.llama_facts import query_facts
from appliance.engines.llama_perplexity import BINARY, Extent, arguments, command
from appliance.errors import ModelUnreadableError
from appliance.plan import Plan, Verdict
from appliance.tune.measure import Step
from appliance.tune.quality import TEXT, check
from benchmarks.memory import planned_for
from tests.golden.plans import facts
from tests.shapes import SMALL, write_gguf

FAKE = Path(__file__).parents[1] / "fakes" / "fake_perplexity.py"
SMOLLM2 = COPIED.parent / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
_, ENGINE = facts(has_cuda=False)
DAY_S, SLOW = 86_400.0, 0.1113  # makes twelve pieces of 256 tokens, however busy this machine is
Start = Callable[[Plan, Extent], Command]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return planned_for(ENGINE, write_gguf(tmp_path / "model.gguf", SMALL["gqa"]), {"ctx_size": "4096"})


def faked(knobs: Mapping[str, tuple[str, ...]], stall_timeout_s: float = 60.0) -> Start:
    """The fake with the knobs of each type."""

    async def never() -> bool:
        return False

    def start(plan: Plan, extent: Extent) -> Command:
        words = (*arguments(plan, ENGINE, TEXT, extent), *knobs.get(plan.kv_type, ()))
        return Command(
            argv=(sys.executable, "-I", "-S", str(FAKE), *words), is_ready=never, stall_timeout_s=stall_timeout_s
        )

    return start


async def checked(
    plan: Plan, start: Start, *kinds: str, budget_s: float = 120.0, prefill_tokens_per_s: float = 1e5
) -> tuple[Verdict, ...]:
    said: list[Step] = []
    found = await check(
        plan, kinds, start, budget_s=budget_s, prefill_tokens_per_s=prefill_tokens_per_s, tell=said.append
    )
    assert all("tokens of text with a KV cache of" in step.what for step in said)
    return found


async def test_the_first_that_is_harmless_ends_the_check(plan: Plan) -> None:
    knobs = {"q4_0": ("--shift", "0.03"), "q5_1": ("--shift", "0.002", "--noise", "0.004"), "q5_0": ("--say", "error")}
    harmful, harmless = await checked(plan, faked(knobs), "q4_0", "q5_1", "q5_0")
    assert (harmful.kv_type, harmful.is_accepted) == ("q4_0", False)
    assert "refused, it costs more than 1 %: perplexity +3.05 %" in harmful.why
    assert (harmless.kv_type, harmless.is_accepted) == ("q5_1", True)
    assert harmless.pieces == 28
    assert harmless.tokens == 28 * 511
    assert harmless.difference == pytest.approx(0.002, abs=1e-5)
    assert harmless.standard_error == pytest.approx(0.004 / 27**0.5, rel=0.01)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (("--noise", "0.1"), "refused, inconclusive"),
        (("--stop-after", "13"), "read 13 of 28 pieces of text and ended"),
        (("--text-has", "5"), "too little text was read: 5 pieces"),
        (("--kill-after", "20"), "was killed by SIGKILL"),
        (("--say", "error: invalid argument: --chunks"), "invalid argument: --chunks"),
        (("--say", "0.00.1 E ggml: failed to allocate CPU buffer of size 99"), "failed to allocate"),
        (("--nan",), "no numbers"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
async def test_what_was_not_shown_is_refused_with_its_reason(plan: Plan, knobs: tuple[str, ...], words: str) -> None:
    (found,) = await checked(plan, faked({"q4_0": knobs}), "q4_0")
    assert not found.is_accepted
    assert words in found.why
    assert not words.startswith(("was", "read")) or f"engine {BINARY} " in found.why


async def test_a_failure_with_f16_refuses_every_type(plan: Plan) -> None:
    found = await checked(plan, faked({"f16": ("--stop-after", "2")}), "q4_0", "q5_1")
    assert [verdict.kv_type for verdict in found] == ["q4_0", "q5_1"]
    assert all(f"refused, with f16 engine {BINARY} read 2 of 28" in verdict.why for verdict in found)
    assert not any(verdict.is_accepted for verdict in found)


async def test_a_stall_and_a_lack_of_time_are_refused(plan: Plan) -> None:
    (stalled,) = await checked(plan, faked({"q4_0": ("--hang-after", "14")}, stall_timeout_s=1.0), "q4_0")
    assert "made no progress" in stalled.why
    (late,) = await checked(plan, faked({"q4_0": ("--hang-after", "14")}), "q4_0", budget_s=10.0)
    assert "did not read the text within" in late.why
    (never,) = await checked(plan, faked({}), "q4_0", budget_s=5.0, prefill_tokens_per_s=10.0)
    assert "5 s are too short at 10 tokens a second" in never.why
    (absent,) = await checked(
        plan, lambda _, __: Command(argv=("/nowhere/llama-perplexity",), is_ready=asyncio.Event().wait), "q4_0"
    )
    assert "cannot be started: /nowhere/llama-perplexity" in absent.why
    (vectors,) = await checked(replace(plan, is_embedding=True), faked({}), "q4_0")
    assert "foretells no text" in vectors.why
    assert not any(verdict.is_accepted for verdict in (stalled, late, never, absent, vectors))


async def test_a_check_that_is_cancelled_leaves_no_process(plan: Plan) -> None:
    begin = faked({"f16": ("--hang-after", "1")})
    task = asyncio.create_task(checked(plan, begin, "q4_0"))
    await eventually(lambda: bool(running_with(plan.model_path)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running_with(plan.model_path) == []


def running_with(word: str) -> list[str]:
    """Processes that have this word in their command line."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has gone meanwhile
            found += [path.parent.name] if word.encode() in path.read_bytes() else []
    return found


def real(folder: Path) -> tuple[Plan, Start]:
    """Of the model at `folder`/model.gguf with the real engine."""
    binary = find_engine(BINARY)
    engine = query_facts(find_engine("llama-server"))
    plan = planned_for(engine, folder / "model.gguf", {"ctx_size": "4096"})

    def start(plan: Plan, extent: Extent) -> Command:
        return command(
            plan, engine, extent, text=TEXT, engine_dir=binary.parent, cache_dir=folder, stall_timeout_s=120.0
        )

    return plan, start


async def test_the_real_program_reads_a_model_and_its_cut_file_is_unreadable(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", SMALL["moe"], with_data=True)
    plan, start = real(tmp_path)
    found = await checked(plan, start, "q4_0", "q8_0", budget_s=DAY_S, prefill_tokens_per_s=SLOW)
    assert found[0].pieces == 12
    assert found[0].tokens == 12 * 127
    assert found[0].difference is not None
    assert found[0].difference != 0.0
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(ModelUnreadableError, match=f"engine {BINARY} exited with code 1 .*not within the file bounds"):
        await checked(plan, start, "q4_0")


async def test_smollm2_bears_q8_0_and_not_q4_0(tmp_path: Path) -> None:
    if not SMOLLM2.exists():
        pytest.skip(f"needs {SMOLLM2}: `python -m images fetch demo` puts it there")
    (tmp_path / "model.gguf").symlink_to(SMOLLM2)
    plan, start = real(tmp_path)
    small, large = await checked(plan, start, "q4_0", "q8_0", budget_s=DAY_S, prefill_tokens_per_s=SLOW)
    assert small.pieces == large.pieces == 12
    assert not small.is_accepted
    assert small.difference is not None
    assert large.difference is not None
    assert 0.01 < small.difference < 0.08
    assert abs(large.difference) < 0.01
    assert large.is_accepted
