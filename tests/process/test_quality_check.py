"""A check of KV types: how it ends against a program of known differences, and what the real engine says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.command import Command
from appliance.engines.engine import ChunkSpec, Install, TextReader
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.process.facts import query_facts
from appliance.engines.llama.process.log import is_error
from appliance.engines.llama.process.perplexity import BINARY, Perplexity, arguments
from appliance.errors import ModelUnreadableError
from appliance.plan import KvCheck, Plan, with_launch
from appliance.tune.figures.perplexity import ScoredChunk
from appliance.tune.trials.kv_quality import SILENT_TRIES, TEXT, check
from appliance.tune.trials.run_trial import Step
from benchmarks.memory import planned_for
from tests.builders import facts
from tests.fakes.quick import program
from tests.process.stages.engine import COPIED, find_engine
from tests.process.stages.supervisor import eventually
from tests.shapes import SMALL, write_gguf

SMOLLM2 = COPIED.parent / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
_, ENGINE = facts(has_cuda=False)
DAY_S, SLOW = 86_400.0, 0.1113  # makes twelve pieces of 256 tokens, however busy this machine is
Start = Callable[[Plan, ChunkSpec, Path], TextReader]
INSTALL = Install(engine_dir=Path("/nowhere"), facts=ENGINE, cache_dir=Path("/nowhere"))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return planned_for(ENGINE, write_gguf(tmp_path / "model.gguf", SMALL["gqa"]), {"ctx_size": "4096"})


def faked(knobs: Mapping[str, tuple[str, ...]], stall_timeout_s: float = 60.0) -> Start:
    """Return a function that starts the fake with the knobs of the plan's KV type."""

    async def never() -> bool:
        return False

    def start(plan: Plan, chunk_spec: ChunkSpec, text: Path) -> TextReader:
        words = (*arguments(plan, ENGINE, text, chunk_spec), *knobs.get(plan.kv_type, ()))
        reader = Perplexity(plan, INSTALL, chunk_spec, text)
        reader.command = Command(
            argv=(*program("fake_perplexity"), *words),
            is_ready=never,
            is_error=is_error,
            stall_timeout_s=stall_timeout_s,
        )
        return reader

    return start


async def checked(
    plan: Plan,
    start: Start,
    *kinds: str,
    budget_s: float = 120.0,
    prefill_tokens_per_s: float = 1e5,
    scored_chunks: list[ScoredChunk] | None = None,
) -> tuple[KvCheck, ...]:
    """Return the checks of these KV types. `scored_chunks` has the results of earlier checks, and the new ones are
    appended."""
    said: list[Step] = []
    scored_chunks = [] if scored_chunks is None else scored_chunks
    found = await check(
        plan,
        kinds,
        start,
        budget_s=budget_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        on_step=said.append,
        kept=tuple(scored_chunks),
        on_result=scored_chunks.append,
    )
    assert all("tokens of text with a KV cache of" in step.what for step in said)
    return found


async def test_the_first_that_is_harmless_ends_the_check(plan: Plan) -> None:
    knobs = {"q4_0": ("--shift", "0.03"), "q5_1": ("--shift", "0.002", "--noise", "0.004"), "q5_0": ("--say", "error")}
    harmful, harmless = await checked(plan, faked(knobs), "q4_0", "q5_1", "q5_0")
    assert (harmful.kv_type, harmful.is_accepted) == ("q4_0", False)
    assert "refused, it costs more than 1 %: perplexity +3.05 %" in harmful.why
    assert (harmless.kv_type, harmless.is_accepted) == ("q5_1", True)
    assert harmless.chunks == 28
    assert harmless.tokens == 28 * 511
    assert harmless.difference == pytest.approx(0.002, abs=1e-5)
    assert harmless.standard_error == pytest.approx(0.004 / 27**0.5, rel=0.01)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (("--noise", "0.1"), "refused, inconclusive"),
        (("--stop-after", "13"), "read 13 of 28 chunks of text and ended"),
        (("--text-has", "5"), "too little text was read: 5 chunks"),
        (("--kill-after", "20"), "was killed by SIGKILL"),
        (("--say", "error: invalid argument: --chunks"), "invalid argument: --chunks"),
        (("--say", "0.00.1 E ggml: failed to allocate CPU buffer of size 99"), "failed to allocate"),
        (("--nan",), "not finite numbers"),
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
    assert [kv_check.kv_type for kv_check in found] == ["q4_0", "q5_1"]
    assert all(f"refused, with f16 engine {BINARY} read 2 of 28" in kv_check.why for kv_check in found)
    assert not any(kv_check.is_accepted for kv_check in found)


async def test_a_stall_and_a_lack_of_time_are_refused(plan: Plan) -> None:
    (stalled,) = await checked(plan, faked({"q4_0": ("--hang-after", "14")}, stall_timeout_s=1.0), "q4_0")
    assert "made no progress" in stalled.why
    (late,) = await checked(plan, faked({"q4_0": ("--hang-after", "11")}), "q4_0", budget_s=30.0)
    assert "did not read the text within 30 s: 11 chunks of at least 12" in late.why
    (never,) = await checked(plan, faked({}), "q4_0", budget_s=5.0, prefill_tokens_per_s=10.0)
    assert "5 s are too short at 10 tokens a second" in never.why
    (absent,) = await checked(plan, lambda plan, chunk_spec, text: Perplexity(plan, INSTALL, chunk_spec, text), "q4_0")
    assert "cannot be started: /nowhere/llama-perplexity" in absent.why
    (vectors,) = await checked(replace(plan, is_embedding=True), faked({}), "q4_0")
    assert "generates no text" in vectors.why
    assert not any(kv_check.is_accepted for kv_check in (stalled, late, never, absent, vectors))


HARMLESS = ("--shift", "0.002", "--noise", "0.004")


class Counted:
    """A starter of the fake that records the KV type of each start."""

    def __init__(self, knobs: Mapping[str, tuple[str, ...]]) -> None:
        self._start = faked(knobs)
        self.kinds: list[str] = []

    def __call__(self, plan: Plan, chunk_spec: ChunkSpec, text: Path) -> TextReader:
        self.kinds.append(plan.kv_type)
        return self._start(plan, chunk_spec, text)


async def test_what_was_read_before_is_not_read_again(plan: Plan) -> None:
    scored_chunks: list[ScoredChunk] = []
    first, again = Counted({"q5_1": HARMLESS}), Counted({"q5_1": HARMLESS})
    found = await checked(plan, first, "q5_1", scored_chunks=scored_chunks)
    assert first.kinds == ["f16", "q5_1"]
    assert [len(scored_chunk.nll) for scored_chunk in scored_chunks] == [28, 28]
    assert await checked(plan, again, "q5_1", scored_chunks=scored_chunks) == found
    assert again.kinds == []
    smaller = replace(plan, context=plan.context - 256)
    assert await checked(smaller, again, "q5_1", scored_chunks=scored_chunks) == found
    assert again.kinds == [], "with less memory another window is served, and the text is read with none of it"
    (kv_check,) = await checked(plan, again, "q4_0", scored_chunks=scored_chunks)
    assert kv_check.is_accepted
    assert again.kinds == ["q4_0"], "the text was read with f16 before"
    other = Counted({})
    await checked(with_launch(plan, threads=launch_of(plan).threads + 1), other, "q5_1", scored_chunks=scored_chunks)
    assert other.kinds == ["f16", "q5_1"], "of another plan"
    await checked(replace(plan, context=600), other, "q5_1", scored_chunks=scored_chunks)
    assert other.kinds[2:] == ["f16", "q5_1"], "of longer pieces"


async def test_a_row_of_checks_that_are_broken_off_gets_to_its_end(plan: Plan, tmp_path: Path) -> None:
    """Each run is broken off after three pieces, or five with f16, as if a request came."""
    mark = tmp_path / "hangs"
    hang = ("--mark", str(mark), "--hang-after")
    start = Counted({"f16": (*hang, "5"), "q5_1": (*HARMLESS, *hang, "3")})
    scored_chunks: list[ScoredChunk] = []
    for _ in range(100):
        mark.unlink(missing_ok=True)
        before = len(scored_chunks)
        task = asyncio.create_task(checked(plan, start, "q5_1", budget_s=DAY_S, scored_chunks=scored_chunks))
        await eventually(lambda task=task: mark.exists() or task.done(), timeout_s=120)  # type: ignore[misc]
        if task.done():
            break
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(scored_chunks) > before, "what was read until then is kept"
        mark.unlink(missing_ok=True)
    (kv_check,) = task.result()
    assert kv_check.is_accepted
    assert kv_check.chunks == 28
    read = [(p.key, p.first, len(p.nll)) for p in scored_chunks]
    assert len({(key, first) for key, first, _ in read}) == len(read), "nowhere was begun twice with the same type"
    assert sum(count for key, _, count in read if "q5_1" in key) == 28, "no piece was read twice"
    assert {count for key, _, count in read if "f16" in key} <= {1, 2, 3, 4, 5}


async def test_what_is_read_from_a_later_piece_on_is_another_text_of_whole_words(plan: Plan) -> None:
    texts: list[bytes] = []

    def start(plan: Plan, chunk_spec: ChunkSpec, text: Path) -> TextReader:
        texts.append(text.read_bytes())
        return faked({})(plan, chunk_spec, text)

    (exact, other) = (replace(plan, kv_type=kind, context=1024).key for kind in ("f16", "q4_0"))
    nll = (3.0,) * 20
    scored_chunks = [ScoredChunk(key=key, chunk_tokens=1024, first=0, nll=nll, seconds=1.0) for key in (exact, other)]
    (kv_check,) = await checked(plan, start, "q4_0", scored_chunks=scored_chunks)
    assert kv_check.chunks == 28
    assert [(p.key, p.first, len(p.nll)) for p in scored_chunks[2:]] == [(exact, 20, 8), (other, 20, 8)]
    whole = TEXT.read_bytes()
    (one,) = set(texts)
    at = whole.index(one[:100])
    assert 20 * 1024 * 5 < at < 20 * 1024 * 5 + 40
    assert whole[at - 1 : at] == b" "
    assert one == whole[at:] + whole[:at]


async def test_where_time_is_up_what_was_read_is_judged_and_read_on_next_time(plan: Plan) -> None:
    scored_chunks: list[ScoredChunk] = []
    await checked(plan, faked({"q4_0": ("--say", "error: not this time")}), "q4_0", scored_chunks=scored_chunks)
    scored_chunks[:] = [p for p in scored_chunks if p.error is None]
    hanging = faked({"q4_0": ("--noise", "0.1", "--hang-after", "14")})
    (hurried,) = await checked(plan, hanging, "q4_0", budget_s=30.0, scored_chunks=scored_chunks)
    assert "refused, inconclusive" in hurried.why
    assert hurried.chunks == 14
    (calm,) = await checked(plan, faked({}), "q4_0", scored_chunks=scored_chunks)
    assert calm.chunks == 28
    assert [p.first for p in scored_chunks] == [0, 0, 14, 14]


async def test_what_failed_is_tried_once_more_and_then_believed(plan: Plan) -> None:
    scored_chunks: list[ScoredChunk] = []
    broken = {"q4_0": ("--kill-after", "20")}
    for tries in (1, 2, 2):
        start = Counted(broken)
        (kv_check,) = await checked(plan, start, "q4_0", scored_chunks=scored_chunks)
        assert "was killed by SIGKILL" in kv_check.why
        assert sum(p.error is not None for p in scored_chunks) == tries
    assert start.kinds == []
    (kv_check,) = await checked(replace(plan, context=plan.context - 256), start, "q4_0", scored_chunks=scored_chunks)
    assert "was killed by SIGKILL" in kv_check.why
    assert start.kinds == [], "nor with another window"
    assert [len(p.nll) for p in scored_chunks if p.error is None] == [28], (
        "what a run that failed has read does not count"
    )
    mended: list[ScoredChunk] = [p for p in scored_chunks if p.error is None] + [p for p in scored_chunks if p.error][
        :1
    ]
    (kv_check,) = await checked(plan, faked({}), "q4_0", scored_chunks=mended)
    assert kv_check.is_accepted


async def test_a_last_row_that_the_program_loses_is_not_missed(plan: Plan) -> None:
    (found,) = await checked(plan, faked(dict.fromkeys(("f16", "q4_0"), ("--lose-last-row",))), "q4_0")
    assert (found.is_accepted, found.chunks) == (True, 28)


async def test_a_check_that_is_cancelled_leaves_no_process(plan: Plan) -> None:
    begin = faked({"f16": ("--hang-after", "1")})
    task = asyncio.create_task(checked(plan, begin, "q4_0"))
    await eventually(lambda: bool(running_with(plan.model_path)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running_with(plan.model_path) == []


def running_with(word: str) -> list[str]:
    """Return the pids of processes that have this word in their command line."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has gone meanwhile
            found += [path.parent.name] if word.encode() in path.read_bytes() else []
    return found


def real(folder: Path) -> tuple[Plan, Start]:
    """Return a plan for `folder`/model.gguf and a function that starts the real engine's reader of texts."""
    binary = find_engine(BINARY)
    engine = query_facts(find_engine("llama-server"))
    plan = planned_for(engine, folder / "model.gguf", {"ctx_size": "4096", "threads": "1"})
    install = Install(engine_dir=binary.parent, facts=engine, cache_dir=folder)

    def start(plan: Plan, chunk_spec: ChunkSpec, text: Path) -> TextReader:
        return Perplexity(plan, install, chunk_spec, text)

    return plan, start


async def test_a_program_that_fails_without_a_word_is_asked_again(plan: Plan, tmp_path: Path) -> None:
    """The real one loses its log when it fails at once and the machine is busy."""
    runs = tmp_path / "runs"
    silent = ("--silent", str(runs), "--silent-runs", str(SILENT_TRIES - 1))
    (found,) = await checked(plan, faked({"f16": silent}), "q8_0")
    assert found.is_accepted
    assert len(runs.read_text().splitlines()) == SILENT_TRIES
    runs.unlink()
    silent = ("--silent", str(runs), "--silent-runs", str(SILENT_TRIES))
    (found,) = await checked(plan, faked({"f16": silent}), "q8_0")
    assert found.why == "refused, with f16 engine llama-perplexity exited with code 1 before it was ready"
    assert len(runs.read_text().splitlines()) == SILENT_TRIES


async def test_a_program_that_ends_with_words_is_not_asked_again(plan: Plan, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    words = ("--silent", str(runs), "--say", "error: failed to load model")
    (found,) = await checked(plan, faked({"f16": words}), "q8_0")
    assert not found.is_accepted
    assert len(runs.read_text().splitlines()) == 1


async def test_the_real_program_reads_a_model_and_its_cut_file_is_unreadable(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", SMALL["moe"], with_data=True)
    plan, start = real(tmp_path)
    found = await checked(plan, start, "q4_0", "q8_0", budget_s=DAY_S, prefill_tokens_per_s=SLOW)
    assert found[0].chunks == 12
    assert found[0].tokens == 12 * 127
    assert found[0].difference is not None
    assert found[0].difference != 0.0
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(ModelUnreadableError, match=f"engine {BINARY} exited with code 1 .*not within the file bounds"):
        print(await checked(plan, start, "q4_0"))  # shown where it does not raise


async def test_smollm2_bears_q8_0_and_not_q4_0(tmp_path: Path) -> None:
    if not SMOLLM2.exists():
        pytest.skip(f"needs {SMOLLM2}: `python -m images fetch demo` puts it there")
    (tmp_path / "model.gguf").symlink_to(SMOLLM2)
    plan, start = real(tmp_path)
    small, large = await checked(plan, start, "q4_0", "q8_0", budget_s=DAY_S, prefill_tokens_per_s=SLOW)
    assert small.chunks == large.chunks == 12
    assert not small.is_accepted
    assert small.difference is not None
    assert large.difference is not None
    assert 0.01 < small.difference < 0.08
    assert abs(large.difference) < 0.01
    assert large.is_accepted
