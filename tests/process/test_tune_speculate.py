"""Guessing ahead, chosen by measuring: on a fake engine whose guesses cost and hit as told, and on the real one."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from appliance.command import Command
from appliance.engines.engine import Install
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.planning.speculation import applied, estimate
from appliance.engines.llama.process.facts import query_facts
from appliance.engines.llama.process.server import command, speculation_arguments
from appliance.errors import ConfigError, FatalError, ModelDoesNotFitError, ModelUnreadableError
from appliance.image_facts import EngineFacts
from appliance.model import Model, read_draft, read_model
from appliance.plan import Kind, Plan, Speculation
from appliance.probe import Hardware, probe
from appliance.settings import resolve_settings
from appliance.tune.speculate import PROMPTS, ROUNDS, Tried, choose_speculation, measure_speculation, parse_prompts
from tests.builders import IMAGE
from tests.process.stages.engine import bench_of, find_engine
from tests.process.stages.supervisor import MakeCommand
from tests.shapes import SMALL, write_gguf

FLAGS = (
    *("--spec-type", "--model-draft", "--spec-draft-n-max", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-min"),
    *("--cache-type-k-draft", "--cache-type-v-draft"),
)
ENGINE = EngineFacts(version="1", build=1, commit="abc", flags=FLAGS, kv_types=("f16", "q8_0"))
SMOLLM = Path(__file__).parents[2] / ".make/models/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def hardware() -> Hardware:
    return probe(Path("/tmp"), {})


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return read_model(write_gguf(tmp_path / "drafts.gguf", SMALL["mla-with-drafts"], with_data=True))


def planned(hardware: Hardware, model: Model, engine: EngineFacts = ENGINE, **flags: Any) -> Plan:
    return space_of(hardware, model, engine, **flags).best


def space_of(
    hardware: Hardware, model: Model, engine: EngineFacts = ENGINE, *, draft: Model | None = None, **flags: str
) -> Space:
    settings = resolve_settings({"ctx_size": "4096", "threads": "1", "devices": "none", **flags}, {})
    return Space(settings, IMAGE, engine, hardware, model, draft=draft)


class Stage:
    """A chooser on a fake engine. `starts` has the words that each start was given."""

    def __init__(self, make_command: MakeCommand, hardware: Hardware, model: Model) -> None:
        self.make_command, self.hardware, self.model = make_command, hardware, model
        self.starts: list[str] = []

    def choose(
        self, *knobs: str, left_s: float = 600.0, draft: Model | None = None, bad: str = "--no", **flags: Any
    ) -> tuple[Speculation | None, str, list[Tried]]:
        def start(of: Plan) -> Command:
            told = speculation_arguments(of, ENGINE)
            self.starts.append(" ".join(told))
            ends = ("--error-line", "the draft is broken", "--die-before-ready", "1") if bad in told else ()
            return self.make_command(*knobs, *told, *ends)

        space = space_of(self.hardware, self.model, draft=draft, **flags)
        began = time.monotonic()
        work = choose_speculation(
            space.best,
            bench_of(start),
            space,
            requested=flags.get("speculation", "auto"),
            left_s=lambda: began + left_s - time.monotonic(),
            ask_s=left_s / ROUNDS,
            on_step=lambda step: None,
        )
        return asyncio.run(work)

    @property
    def sizes(self) -> list[int]:
        """The number of draft tokens of each start, in order; 0 if there was no draft."""
        return [int(words.split()[3]) if words else 0 for words in self.starts]


@pytest.fixture
def stage(make_command: MakeCommand, hardware: Hardware, model: Model) -> Stage:
    return Stage(make_command, hardware, model)


def test_the_laws_best_is_found_and_those_beside_it_are_measured(stage: Stage) -> None:
    """Three draft tokens give the most: (1 + .8 + .64 + .51) / (1 + 3 * .3) = 1.55."""
    speculation, why, tried = stage.choose("--guess", "draft-mtp:0.3,0.8", "--guess", "ngram-mod:0.3,0.1")
    assert speculation is not None
    assert (speculation.kind, speculation.tokens) == ("mtp", 3)
    assert stage.sizes[:3] == [0, 1, 3]
    assert sorted(stage.sizes[3:5]) == [2, 4]
    assert stage.sizes[5:] == [8, 0]
    assert [t.kind for t in tried] == [None, "mtp", "mtp", "mtp", "mtp", "ngram", None]
    assert "up to 3 tokens drafted by the model's draft layer" in why
    assert "36% shorter" in why
    assert len({a.name for a in tried[0].answers}) >= 3


def test_nothing_is_guessed_where_that_is_as_fast(stage: Stage) -> None:
    speculation, why, _ = stage.choose("--guess", "draft-mtp:0.9,0.8", "--guess", "ngram-mod:1,0.1")
    assert speculation is None
    assert stage.sizes == [0, 1, 8]
    assert why.startswith("speculative decoding gains nothing: mtp 1: ")
    assert "6% longer (chat +6%, edit +6%, summary +6%); 0.56 draft tokens per token, 79% accepted" in why


@pytest.mark.parametrize(
    ("gain", "goal", "is_served", "words"),
    [  # by seed: summaries, chats but for the last of them, edits
        ("0.9/0.9/0.9", "stable", True, r"% shorter \(chat -\d+%, edit -\d+%, summary -\d+%\)"),
        ("0.9/0.0/0.9", "auto", True, r"% shorter \(chat \+\d+%, edit -\d+%, summary -\d+%\)"),
        ("0.9/0.0/0.9", "stable", False, "without making some kind of request slower: mtp"),
        ("0.1/0.0/0.6", "auto", False, "speculative decoding gains nothing: mtp"),
        ("0.1/0.0/0.6", "fast", True, r"% longer \(chat \+\d+%, edit -\d+%, summary \+\d+%\)"),
        ("0.2/0.1/0.2", "fast", False, "for any kind of request: mtp"),
    ],
)
def test_kinds_of_request_that_gain_and_that_lose(
    stage: Stage, gain: str, goal: str, is_served: bool, words: str
) -> None:
    speculation, why, _ = stage.choose("--guess", f"draft-mtp:0.3,{gain}", speculation=goal)
    assert (speculation is not None) == is_served, why
    assert re.search(words, why)


def test_a_start_that_takes_longer_than_there_is_time_is_given_up(stage: Stage) -> None:
    speculation, why, tried = stage.choose("--hang-on-completion", left_s=2.0)
    assert (speculation, why, tried) == (None, "no time was left to measure what speculative decoding gains", [])
    assert stage.sizes == [0]


def test_what_was_asked_for_is_served_with_its_best_number_and_the_truth(stage: Stage) -> None:
    speculation, why, _ = stage.choose("--guess", "draft-mtp:0.9,0.8", speculation="mtp")
    assert speculation is not None
    assert (speculation.kind, speculation.tokens) == ("mtp", 1)
    assert why.startswith("asked for, up to 1 token drafted")
    assert "6% longer" in why


def test_answers_that_go_round_in_circles_do_not_count(stage: Stage) -> None:
    speculation, why, tried = stage.choose("--loop", "--guess", "draft-mtp:0.1,0.99")
    assert speculation is None
    assert why.startswith("no answer could be used")
    assert [t.kind for t in tried] == [None]
    assert tried[0].describe().endswith("of them looping")


def test_without_time_nothing_is_started(stage: Stage) -> None:
    assert stage.choose(left_s=0.0)[:2] == (None, "no time was left to measure what speculative decoding gains")
    speculation, why, tried = stage.choose(left_s=0.0, speculation="ngram")
    assert speculation is not None
    assert (speculation.kind, speculation.tokens) == ("ngram", 16)
    assert why.endswith("its gain was not measured")
    assert (stage.starts, tried) == ([], [])
    assert stage.choose(speculation="off")[:2] == (
        None,
        "nothing to draft with: speculation is off (flag --speculation)",
    )


def test_a_kind_that_does_not_start_costs_only_itself_unless_asked_for(stage: Stage) -> None:
    speculation, _, tried = stage.choose("--guess", "ngram-mod:0.01,0.9", bad="draft-mtp")
    assert speculation is not None
    assert speculation.kind == "ngram"
    failed = [t for t in tried if t.error]
    assert [(t.kind, t.tokens) for t in failed] == [("mtp", 1)]
    assert "mtp 1: " in failed[0].describe()
    with pytest.raises(FatalError) as ending:
        stage.choose(bad="draft-mtp", speculation="mtp")
    assert ending.value.exit_code == 43
    assert any("the draft is broken" in line for line in ending.value.log)


def test_an_engine_that_guesses_nothing_although_asked_is_said(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="engine drafts nothing with speculation 'mtp'"):
        stage.choose(speculation="mtp")


def test_a_draft_model_without_room_is_refused_when_asked_for(stage: Stage) -> None:
    layer = replace(stage.model.stack[0], dense_bytes=1 << 50)
    large = replace(stage.model, weights_bytes=1 << 50, stack=(layer,))
    flags: dict[str, Any] = {"draft_model": "large.gguf", "speculation": "draft"}
    with pytest.raises(ModelDoesNotFitError, match="speculation does not fit"):
        stage.choose(draft=large, **flags)
    _, why, tried = stage.choose(draft=large, draft_model="large.gguf")
    assert "draft 1: speculation does not fit" in why
    assert tried[1].error


def test_prompts_are_a_dozen_of_three_kinds_in_turn() -> None:
    prompts = parse_prompts(PROMPTS.read_text())
    assert len(prompts) == 12
    assert [name.partition(":")[0] for name in prompts][:3] == ["chat", "edit", "summary"]
    assert all(len(text) > 100 for text in prompts.values())


class Real:
    """The engine of the image, one start at a time."""

    def __init__(self, folder: Path, hardware: Hardware) -> None:
        self.binary = find_engine("llama-server")
        self.facts = query_facts(self.binary)
        self.folder, self.hardware = folder, hardware

    def measure(self, of: Plan, like: Tried | None = None) -> Tried:
        install = Install(engine_dir=self.binary.parent, facts=self.facts, cache_dir=self.folder)
        start: Callable[[Plan], Command] = partial(command, install=install, socket_path=self.folder / "e.sock")
        return asyncio.run(measure_speculation(of, bench_of(start), ask_s=0.5, like=like, on_step=lambda step: None))

    def guessing(
        self, model: Model, kind: Kind, tokens: int, draft: Model | None = None, like: Tried | None = None
    ) -> Tried:
        of = planned(self.hardware, model, self.facts)
        isa = next((each.isa for each in self.facts.cpu_variants if each.name == of.cpu_variant), self.hardware.cpu.isa)
        speculation = estimate(of, kind, tokens, model=model, draft=draft, isa=isa)
        return self.measure(applied(of, speculation), like)


@pytest.fixture
def real(socket_path: Path, hardware: Hardware) -> Real:
    return Real(socket_path.parent, hardware)


def smollm() -> Model:
    if not SMOLLM.exists():
        pytest.skip(f"needs {SMOLLM}: `make integration` fetches it")
    return read_model(SMOLLM)


def totals(tried: Tried) -> tuple[int, int, int]:
    return (
        sum(a.made for a in tried.answers),
        sum(a.drafted for a in tried.answers),
        sum(a.accepted for a in tried.answers),
    )


@pytest.mark.parametrize("name", ["mla-with-drafts", "delta-net"])
def test_the_real_engine_drafts_with_the_models_own_layer(real: Real, tmp_path: Path, name: str) -> None:
    found = read_model(write_gguf(tmp_path / "m.gguf", SMALL[name], with_data=True))
    base = real.measure(planned(real.hardware, found, real.facts))
    guessed = real.guessing(found, "mtp", 2, like=base)
    made, drafted, accepted = totals(guessed)
    assert [a.name for a in guessed.answers] == [a.name for a in base.answers]
    assert made == totals(base)[0]
    assert 0 <= accepted < drafted
    assert drafted > made


def test_the_real_engine_drafts_with_the_model_itself_as_its_draft(real: Real) -> None:
    found = smollm()
    draft = read_draft(str(SMOLLM), found, SMOLLM.parent, "flag --draft-model")
    guessed = real.guessing(found, "draft", 1, draft)
    made, drafted, accepted = totals(guessed)
    assert drafted == pytest.approx(made - accepted, abs=2 * len(guessed.answers))  # one for every step
    assert accepted > 0.4 * drafted


def test_the_real_engine_guesses_by_n_grams(real: Real) -> None:
    found = smollm()
    base = real.measure(planned(real.hardware, found, real.facts))
    guessed = real.guessing(found, "ngram", 8, like=base)
    assert totals(base)[1] == 0
    assert [(a.name, a.made) for a in guessed.answers] == [(a.name, a.made) for a in base.answers]


def test_the_real_engine_serves_in_silence_with_a_draft_of_other_tokens(real: Real, tmp_path: Path) -> None:
    """The engine only writes a line to its log, which is why vocabularies are compared before."""
    found = smollm()
    path = write_gguf(tmp_path / "other.gguf", SMALL["gqa"], with_data=True)
    with pytest.raises(ModelUnreadableError, match="it has 512 tokens, not 49,152"):
        read_draft(str(path), found, tmp_path, "flag --draft-model")
    guessed = real.guessing(found, "draft", 2, read_model(path))
    made, drafted, _ = totals(guessed)
    assert made > 0
    assert drafted == 0
