"""Guessing ahead in a plan: what is refused and why, what it takes of memory, its flags, a profile that keeps it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.memory.memory import kv_mib, layers_of, weights_mib
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.planning.speculation import (
    CACHE_LEFT_MIB,
    applied,
    as_asked,
    estimate,
    kinds,
    still_applied,
)
from appliance.engines.llama.process.server import arguments, speculation_arguments
from appliance.errors import ConfigError, EngineArgumentsError, ModelDoesNotFitError
from appliance.model import Model
from appliance.plan import KINDS, SIZES, UNMEASURED, Choice, GpuAllocation, Kind, Placement, Plan, as_document, summary
from appliance.profile import dump_profile, parse_profile
from appliance.settings import Settings, resolve_settings
from tests.builders import ENGINE, IMAGE, SMALL, device, machine, profile

LAYER = replace(layers_of(SMALL)[0], dense_bytes=3 * 2**20)
WITH_DRAFTS = replace(
    SMALL, stack=(*(LAYER,) * 30, replace(LAYER, is_draft=True)), weights_bytes=SMALL.weights_bytes + 3 * 2**20
)


def settings(**flags: str) -> Settings:
    return resolve_settings(flags, {})


def first(model: Model = SMALL, total_mib: int = 16384, **flags: str) -> Plan:
    return Space(settings(**flags), IMAGE, ENGINE, machine(total_mib=total_mib), model).best


def guessing(kind: Kind, tokens: int = 2, base: Plan | None = None, model: Model = WITH_DRAFTS) -> Plan:
    of = base or first(model)
    return applied(of, estimate(of, kind, tokens, model=model, draft=SMALL if kind == "draft" else None))


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        (SMALL, {"speculation": "mtp"}, "'mtp' (flag --speculation): small.gguf has no layers that draft"),
        (SMALL, {"speculation": "draft"}, "'draft' (flag --speculation): no draft model is given"),
        (
            SMALL,
            {"speculation": "ngram", "draft_model": "x.gguf"},
            "'x.gguf' (flag --draft-model), speculation 'ngram'",
        ),
        (WITH_DRAFTS, {"speculation": "mtp", "draft_model": "x.gguf"}, "speculation does not use it"),
        (
            SMALL,
            {"draft_tokens": "3"},
            "3 (flag --draft-tokens): speculation is auto (default), which chooses the number",
        ),
        (SMALL, {"draft_tokens": "3", "speculation": "off"}, "nothing is drafted"),
        (replace(SMALL, is_embedding_model=True), {"speculation": "ngram"}, "gives vectors and no text"),
    ],
)
def test_what_cannot_be_done_is_refused_at_the_start(model: Model, flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as api_error:
        Space(settings(**flags), IMAGE, ENGINE, machine(), model)
    assert words in api_error.value.message
    assert api_error.value.exit_code == 10
    assert api_error.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_without_the_flags_is_a_reason(kind: Kind) -> None:
    old = replace(ENGINE, flags=tuple(flag for flag in ENGINE.flags if not flag.startswith("--spec-")))
    with pytest.raises(ConfigError, match=r"this engine .* has no flag --spec-type"):
        kinds(settings(speculation=kind, **({"draft_model": "x"} if kind == "draft" else {})), WITH_DRAFTS, old)
    assert not any(offer.is_tried for offer in kinds(settings(), WITH_DRAFTS, old, SMALL))


@pytest.mark.parametrize(
    ("model", "draft", "flags", "tried"),
    [
        (SMALL, None, {}, ["ngram"]),
        (WITH_DRAFTS, None, {}, ["mtp", "ngram"]),
        (WITH_DRAFTS, SMALL, {"draft_model": "x"}, ["draft", "mtp", "ngram"]),
        (WITH_DRAFTS, SMALL, {"draft_model": "x", "speculation": "draft"}, ["draft"]),
        (WITH_DRAFTS, None, {"speculation": "off"}, []),
        (WITH_DRAFTS, SMALL, {"speculation": "off", "draft_model": "x"}, []),
        (replace(SMALL, is_embedding_model=True), None, {}, []),
    ],
)
def test_what_is_worth_trying(model: Model, draft: Model | None, flags: dict[str, str], tried: list[str]) -> None:
    offers = kinds(settings(**flags), model, ENGINE, draft)
    assert [offer.kind for offer in offers if offer.is_tried] == tried
    assert [offer.kind for offer in offers] == list(KINDS)
    assert all(offer.reason for offer in offers)


def test_flags_of_each_kind() -> None:
    assert speculation_arguments(first(), ENGINE) == ()
    lines = {kind: " ".join(speculation_arguments(guessing(kind), ENGINE)) for kind in KINDS}
    assert lines == {
        "draft": "--spec-type draft-simple --spec-draft-n-max 2 --cache-type-k-draft f16 --cache-type-v-draft f16 "
        "--model-draft /data/models/small.gguf",
        "mtp": "--spec-type draft-mtp --spec-draft-n-max 2 --cache-type-k-draft f16 --cache-type-v-draft f16",
        "ngram": "--spec-type ngram-mod --spec-ngram-mod-n-max 2 --spec-ngram-mod-n-min 1",
    }
    assert set(arguments(guessing("mtp"), ENGINE, Path("/tmp/s"))) >= {"draft-mtp"}
    old = replace(ENGINE, flags=tuple(flag for flag in ENGINE.flags if flag != "--spec-type"))
    with pytest.raises(EngineArgumentsError):
        speculation_arguments(guessing("ngram"), old)


def test_a_draft_model_takes_its_weights_and_its_cache() -> None:
    base = first()
    grown = guessing("draft", base=base, model=SMALL)
    assert grown.memory.weights - base.memory.weights == pytest.approx(weights_mib(SMALL))
    assert grown.memory.kv - base.memory.kv == pytest.approx(kv_mib(SMALL, "f16", base.context))
    assert grown.predicted_mib > base.predicted_mib + weights_mib(SMALL)


def test_draft_layers_take_their_weights_a_cache_and_states_for_every_guess() -> None:
    base = first(WITH_DRAFTS)
    grown = guessing("mtp", 3, base)
    assert grown.memory.weights - base.memory.weights == pytest.approx(3.0)
    assert grown.memory.kv - base.memory.kv == pytest.approx(base.memory.kv / 30)
    state = tuple(replace(layer, state_bytes=0 if layer.is_draft else 2**20) for layer in WITH_DRAFTS.stack)
    model = replace(WITH_DRAFTS, stack=state)
    base = first(model)
    assert guessing("mtp", 3, base, model).memory.state == pytest.approx(4 * base.memory.state)


@pytest.mark.parametrize(("tokens", "logged"), [(16, 14.17), (64, 51.26)])
def test_logits_of_every_guess_are_an_upper_bound_of_what_was_logged(tokens: int, logged: float) -> None:
    """llama-server b11312 with SmolLM2-135M, -c 2048 -ub 256 -np 4: "CPU compute buffer size", 7.76 without."""
    base = first(ctx_size="2048", ubatch="256")
    grown = guessing("ngram", tokens, base, SMALL)
    assert logged <= grown.memory.compute <= 1.15 * logged


@given(st.sampled_from(KINDS), st.data(), st.integers(1100, 4000))
def test_with_room_or_refused_and_the_prompt_cache_gives_way(kind: Kind, data: st.DataObject, total_mib: int) -> None:
    base = first(WITH_DRAFTS, total_mib)
    tokens = data.draw(st.sampled_from(SIZES[kind]))
    adds = estimate(base, kind, tokens, model=WITH_DRAFTS, draft=SMALL if kind == "draft" else None).adds
    least = base.memory.total + adds.total - max(0, launch_of(base).cache_ram_mib - CACHE_LEFT_MIB)
    assume(abs(least - base.usable_mib) > 1)  # the cache is of whole MiB
    if least > base.usable_mib:
        with pytest.raises(ModelDoesNotFitError, match="speculation does not fit"):
            guessing(kind, tokens, base)
        return
    grown = guessing(kind, tokens, base)
    assert grown.memory.total <= max(base.usable_mib, base.memory.total)
    assert min(128, launch_of(base).cache_ram_mib) <= launch_of(grown).cache_ram_mib <= launch_of(base).cache_ram_mib
    assert launch_of(grown).cache_ram_mib == int(grown.memory.cache)


def test_a_cache_that_was_asked_for_does_not_give_way() -> None:
    base = replace(first(cache_ram_mib="300"), usable_mib=0.0)
    with pytest.raises(ModelDoesNotFitError, match=r"300|more than there are on the host"):
        guessing("draft", base=base, model=SMALL)


def test_a_draft_model_goes_to_the_first_gpu_with_room() -> None:
    def share(name: str, free_mib: float) -> GpuAllocation:
        return GpuAllocation(
            gpu=device(name, free_mib=free_mib),
            device={"a": "CUDA0", "b": "CUDA1"}[name],
            layers=15,
            memory=first().memory,
        )

    used = first().memory.total
    base = replace(first(), placement=Placement(shares=(share("a", used + 10), share("b", used + 5000))))
    grown = guessing("draft", base=base, model=SMALL)
    assert speculation_arguments(grown, ENGINE)[-4:] == ("--device-draft", "CUDA1", "--gpu-layers-draft", "all")
    assert grown.placement.shares[1].memory.total > used + weights_mib(SMALL)
    assert grown.memory.weights == base.memory.weights
    full = replace(base, placement=Placement(shares=(share("a", used + 10), share("b", used + 20))))
    with pytest.raises(ModelDoesNotFitError, match="more than there are on CUDA1"):
        guessing("draft", base=full, model=SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_keeps_it(kind: Kind) -> None:
    kept = replace(profile(), plan=guessing(kind))
    assert parse_profile(dump_profile(kept)) == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "magic"), ("tokens", "2"), ("draft_path", 3), ("device", 0.5), ("adds", None), ("x", 1)],
)
def test_a_damaged_record_is_refused(name: str, value: object) -> None:
    document = json.loads(dump_profile(replace(profile(), plan=guessing("ngram"))))
    document["plan"]["speculation"][name] = value
    with pytest.raises(ValueError, match=rf"speculation.*{name}"):
        parse_profile(json.dumps(document))


def test_what_was_measured_is_served_while_it_fits() -> None:
    words = Choice(name="speculation", value="ngram", reason="faster", source="measured")
    measured = applied(first(), estimate(first(), "ngram", 8, model=SMALL), words)
    served = still_applied(first(), measured)
    assert served.speculation == measured.speculation
    assert words in served.choices
    assert "up to 8 tokens drafted by n-grams" in summary(served)
    assert json.dumps(as_document(served))
    other = still_applied(first(ctx_size="4096"), measured)
    assert other.speculation is None
    assert next(c for c in other.choices if c.name == "speculation").is_refusal
    full = still_applied(replace(first(cache_ram_mib="300"), usable_mib=1.0), measured)
    assert full.speculation is None
    assert "does not fit" in next(c for c in full.choices if c.name == "speculation").reason


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_asked_for_is_in_a_prediction_too(kind: Kind) -> None:
    flags: dict[str, Any] = {"speculation": kind, **({"draft_model": "x.gguf"} if kind == "draft" else {})}
    of = first(WITH_DRAFTS, **flags)
    found = as_asked(of, settings(**flags), model=WITH_DRAFTS, draft=SMALL if kind == "draft" else None)
    assert found.speculation is not None
    assert (found.speculation.kind, found.speculation.tokens) == (kind, UNMEASURED[kind])
    (choice,) = [c for c in found.choices if c.name == "speculation"]
    assert choice.source == "flag --speculation"
    assert found.memory.total > of.memory.total or launch_of(found).cache_ram_mib < launch_of(of).cache_ram_mib
    five = as_asked(
        of, settings(**flags, draft_tokens="5"), model=WITH_DRAFTS, draft=SMALL if kind == "draft" else None
    )
    assert five.speculation is not None
    assert five.speculation.tokens == 5
    assert "5" in speculation_arguments(five, ENGINE)
    for nothing in ("auto", "off"):
        assert as_asked(of, settings(speculation=nothing), model=WITH_DRAFTS) is of


def test_files_that_were_moved_keep_their_guesses() -> None:
    measured = guessing("draft", base=replace(first(), model_path="/old/small.gguf"))
    served = still_applied(first(), measured, draft_path="/new/draft.gguf")
    assert served.speculation is not None
    assert served.speculation.draft_path == "/new/draft.gguf"
    assert "/new/draft.gguf" in speculation_arguments(served, ENGINE)
