from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import VolumeError
from appliance.plan import Checks, NeedleRow, Plan
from appliance.probe.load.conditions import Conditions
from appliance.profile import Key, Profile, ProfileStore, dump_profile, parse_profile
from appliance.profile.partial import dump_partial, parse_partial
from appliance.profile.record import SCHEMA
from appliance.tune.budget import LoadsOfDay
from appliance.tune.checkpoint import DraftTrial, Partial, SlotsTrial
from appliance.tune.figures.curve import Point
from appliance.tune.figures.measurement import Measurement
from appliance.tune.figures.perplexity import ScoredChunk
from appliance.tune.figures.slots import Concurrency, Job
from appliance.tune.figures.workload import CHAT, CODING_AGENT, LONG_DOCUMENT
from appliance.tune.speculate import Answer, Tried
from tests.builders import BUSY, CARD, PARTIAL, QUIET, examples, key, measured, profile, some

ROOT = Path(__file__).parents[3]
TEXT = dump_profile(profile())
DATA = TEXT.encode()


class Shelf:
    """A store and its warnings."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.warnings: list[str] = []
        self.store = ProfileStore(folder, self.warnings.append)
        self.path = folder / f"{key().id}.json"

    def load_bytes(self, data: bytes) -> Profile | None:
        self.warnings.clear()
        self.path.write_bytes(data)
        return self.store.load(key())


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "profiles")


@pytest.fixture(scope="module")
def long_shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Return a shelf that many examples of a property share."""
    return Shelf(tmp_path_factory.mktemp("profiles"))


def test_a_profile_is_read_back_as_it_was_written(shelf: Shelf) -> None:
    assert parse_profile(TEXT) == profile()
    assert dump_profile(parse_profile(TEXT)) == TEXT
    assert shelf.store.load(key()) is None
    shelf.store.save(profile())
    assert shelf.store.load(key()) == profile()
    assert shelf.warnings == []


finite = st.floats(0.001, 1e9)
points = st.builds(
    Point, depth=st.integers(1, 2**20), decode_ms=finite, prefill_ms=finite, prefill_tokens=st.integers(0, 2**20)
)
conditions = st.builds(
    Conditions,
    interval_s=finite,
    cpus=st.none() | st.integers(1, 512),
    own_cpu=st.none() | st.floats(0, 1),
    foreign_cpu=st.none() | st.floats(0, 1),
    steal=st.none() | st.floats(0, 1),
    gpus=st.lists(st.just(CARD), max_size=2).map(tuple),
    problem=st.none() | st.text(),
)
measurements = st.builds(
    Measurement,
    key=st.text(),
    points=st.lists(points, max_size=3).map(tuple),
    is_long=st.booleans(),
    load_s=finite,
    seconds=finite,
    allocated=st.sampled_from([None, profile().allocated]),
    error=st.none() | st.text(),
    lacking_device=st.none() | st.text(),
    lacking_mib=st.none() | finite,
    conditions=st.none() | conditions,
)
many = st.lists(measurements, max_size=4)


@given(many, st.text(), finite, st.lists(st.text(), max_size=3), st.none() | st.text())
def test_any_profile_is_read_back_as_it_was_written(
    found: list[Measurement], speed: str, job_s: float, modes: list[str], disturbance: str | None
) -> None:
    written = replace(
        profile(speed=speed),
        measurements=tuple(found),
        job_s=job_s,
        other_modes=tuple(modes),
        disturbance=disturbance,
    )
    assert parse_profile(dump_profile(written)) == written


counts = st.integers(0, 2**20)
scored_chunks = st.builds(
    ScoredChunk,
    key=st.text(),
    chunk_tokens=st.integers(1, 4096),
    first=counts,
    nll=st.lists(st.floats(allow_nan=False), max_size=4).map(tuple),
    seconds=finite,
    error=st.none() | st.text(),
)
answers = st.builds(
    Answer, name=st.text(), made=counts, ms=finite, drafted=counts, accepted=counts, is_looping=st.booleans()
)
tries = st.builds(
    Tried,
    kind=st.sampled_from([None, "draft", "mtp", "ngram"]),
    tokens=counts,
    tokens_each=counts,
    answers=st.lists(answers, max_size=3).map(tuple),
    seconds=finite,
    error=st.none() | st.text(),
)
jobs = st.builds(Job, seconds=finite, ttft_s=finite, decode_ms=finite, tokens_read=counts, tokens_cached=counts)
seen_together = st.builds(
    Concurrency,
    slots=st.integers(1, 64),
    workload=st.sampled_from([CHAT, CODING_AGENT, LONG_DOCUMENT]),
    jobs=st.lists(jobs, min_size=1, max_size=3).map(tuple),
    load_s=finite,
)
slots_looks = st.builds(SlotsTrial, key=st.text(), slots=st.integers(1, 64), found=seen_together) | st.builds(
    SlotsTrial, key=st.text(), slots=st.integers(1, 64), error=st.text()
)
partials = st.builds(
    Partial,
    measurements=many.map(tuple),
    scored_chunks=st.lists(scored_chunks, max_size=3).map(tuple),
    drafts=st.lists(st.builds(DraftTrial, key=st.text(), tried=tries), max_size=3).map(tuple),
    slots=st.lists(slots_looks, max_size=3).map(tuple),
    loads=st.none() | st.builds(LoadsOfDay, day=st.text(), count=st.integers(0, 99)),
)


@given(partials)
def test_what_was_kept_of_a_tuning_is_read_back_as_it_was_written(found: Partial) -> None:
    text = dump_partial(key(), found)
    assert parse_partial(text, key()) == found
    with pytest.raises(ValueError, match="for another key"):
        parse_partial(text, key("b2"))


def test_what_is_no_number_in_a_text_is_read_back_too() -> None:
    nan = replace(PARTIAL.scored_chunks[0], nll=(math.nan,))
    (found,) = parse_partial(dump_partial(key(), Partial(scored_chunks=(nan,))), key()).scored_chunks
    assert math.isnan(found.nll[0])


def test_how_far_the_prediction_was_off() -> None:
    found = profile()
    assert found.allocated is not None
    memory = found.plan.memory
    predicted = memory.weights + memory.kv + memory.compute + memory.output
    assert found.prediction_error == pytest.approx((predicted - 288.36) / 288.36)
    assert replace(found, allocated=None).prediction_error is None


@pytest.mark.thorough
def test_a_file_that_was_cut_anywhere_is_set_aside_with_a_warning(shelf: Shelf) -> None:
    whole = len(DATA) - 1  # without the final newline
    lengths = some((*range(0, whole - 300, 11), *range(whole - 300, whole)))
    for length in lengths:
        assert shelf.load_bytes(DATA[:length]) is None
        assert len(shelf.warnings) == 1
        assert f"{key().id}.corrupt, measuring again: " in shelf.warnings[0]
        assert not shelf.path.exists()
    assert shelf.path.with_suffix(".corrupt").read_bytes() == DATA[: lengths[-1]]
    assert shelf.load_bytes(DATA[:-1]) == profile()


def types_of(found: Any) -> Any:
    """The shape of a value: dataclasses and the types of their fields, recursively."""
    if isinstance(found, tuple):
        return {repr(types_of(item)) for item in found}
    if hasattr(found, "__dataclass_fields__"):
        return type(found), [(f.name, types_of(getattr(found, f.name))) for f in fields(found)]
    return float if isinstance(found, int) and not isinstance(found, bool) else type(found)


PARTS = (
    *("plan", "plans", "mode", "other_modes", "native", "disturbance"),
    *("job_s", "workload", "speed", "seconds", "stopped_by", "created", "allocated"),
)


@cache
def types_of_parts() -> dict[str, Any]:
    return {name: types_of(getattr(profile(), name)) for name in PARTS}


@settings(max_examples=examples(500))
@given(st.integers(0, len(DATA) * 8 - 1))
def test_a_flipped_bit_is_set_aside_or_leaves_a_profile_of_the_same_types(long_shelf: Shelf, bit: int) -> None:
    damaged = bytearray(DATA)
    damaged[bit // 8] ^= 1 << bit % 8
    found = long_shelf.load_bytes(bytes(damaged))
    if found is None:
        assert len(long_shelf.warnings) == 1
        return
    assert long_shelf.warnings == []
    assert found.key == key()
    for name, types in types_of_parts().items():
        assert types_of(getattr(found, name)) == types, name
    assert {type(m) for m in found.measurements} == {Measurement}


@settings(max_examples=examples(200))
@given(st.binary(max_size=200))
def test_any_bytes_are_set_aside(long_shelf: Shelf, data: bytes) -> None:
    assert long_shelf.load_bytes(data) is None
    assert len(long_shelf.warnings) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(200))
@given(st.sampled_from(sorted(json.loads(TEXT))), json_values)
def test_any_json_in_the_place_of_a_part_is_never_an_exception(long_shelf: Shelf, name: str, value: Any) -> None:
    found = long_shelf.load_bytes(json.dumps({**json.loads(TEXT), name: value}).encode())
    assert (found is None) == (len(long_shelf.warnings) == 1)
    assert found is None or isinstance(found.plan, Plan)


@pytest.mark.parametrize("kind", sorted(json.loads(TEXT)))
def test_a_file_that_lacks_a_part_is_set_aside(shelf: Shelf, kind: str) -> None:
    document = json.loads(TEXT)
    del document[kind]
    assert shelf.load_bytes(json.dumps(document).encode()) is None
    assert kind in shelf.warnings[0]


@pytest.mark.parametrize("found", ["GPU-1", [1], None, {"0": "GPU-1"}])
def test_names_of_gpus_that_are_no_list_of_texts_are_set_aside(shelf: Shelf, found: object) -> None:
    assert shelf.load_bytes(json.dumps({**json.loads(TEXT), "gpu_uuids": found}).encode()) is None
    assert "gpu_uuids" in shelf.warnings[0]


def test_a_deep_or_a_huge_file_is_set_aside(shelf: Shelf) -> None:
    assert shelf.load_bytes(b"[" * 200_000) is None
    assert shelf.load_bytes(b" " * (16 * 2**20) + DATA) is None
    assert "larger than" in shelf.warnings[0]


@pytest.mark.parametrize("schema", [0, SCHEMA - 1, SCHEMA + 1, str(SCHEMA), None])
def test_an_older_or_newer_schema_is_set_aside_under_our_name_and_left_alone_under_another(
    shelf: Shelf, schema: Any
) -> None:
    text = json.dumps({**json.loads(TEXT), "schema": schema})
    other = shelf.folder / "of-another-appliance.json"
    other.write_text(text)
    assert shelf.store.all() == ()
    assert [(found.id, found.schema) for found in shelf.store.foreign()] == [("of-another-appliance", str(schema))]
    words = f"schema of profiles: {schema} -> {SCHEMA}; of-another-appliance is kept"
    assert shelf.store.why_unused(key("b2"), "small.gguf") == words
    assert shelf.store.why_unused(key(size=1), "small.gguf") is None
    assert other.read_text() == text
    assert shelf.warnings == []
    assert shelf.load_bytes(text.encode()) is None
    assert f"profile schema is {schema}, expected {SCHEMA}" in shelf.warnings[0]
    assert shelf.path.with_suffix(".other-schema").read_text() == text


def test_a_profile_for_another_key_under_this_name_is_set_aside(shelf: Shelf) -> None:
    assert shelf.load_bytes(dump_profile(profile(key("b2"))).encode()) is None
    assert "it is for another key" in shelf.warnings[0]


def test_a_key_that_does_not_match_its_parts_is_set_aside(shelf: Shelf) -> None:
    document = json.loads(TEXT)
    document["key"]["parts"]["build"] = "b2"
    assert shelf.load_bytes(json.dumps(document).encode()) is None
    assert "key does not match its parts" in shelf.warnings[0]


def test_profiles_are_listed_newest_first_without_the_damaged(shelf: Shelf) -> None:
    old, new = profile(key("b1")), profile(key("b2"), created="2026-02-01T00:00:00+00:00")
    for found in (old, new):
        shelf.store.save(found)
    (shelf.folder / "damaged.json").write_text("{")
    assert shelf.store.all() == (new, old)
    assert len(shelf.warnings) == 1
    assert (shelf.folder / "damaged.corrupt").exists()


@pytest.mark.parametrize(
    ("changed", "file", "words"),
    [
        (key("b2"), "small.gguf", "build: b1 -> b2"),
        (key("b2"), "renamed.gguf", "build: b1 -> b2"),
        (key(memory_mib=8192), "small.gguf", "hardware.memory_mib: 16384 -> 8192"),
        (key(ctx_size="4096"), "small.gguf", "settings.ctx_size: None -> 4096"),
        (key("b2", kv_type="q8_0"), "small.gguf", "build: b1 -> b2; settings.kv_type: auto -> q8_0"),
        (key(size=1), "other.gguf", None),
    ],
)
def test_what_changed_is_named(shelf: Shelf, changed: Key, file: str, words: str | None) -> None:
    shelf.store.save(profile())
    assert shelf.store.load(changed) is None
    assert shelf.store.why_unused(changed, file) == words


def test_settings_that_do_not_matter_do_not_change_the_key() -> None:
    assert (
        key(
            alias="x",
            cache_ram_mib="1",
            allow_disk="on",
            port="99",
            log="json",
            tune="off",
            budget_s="60",
            drain_s="1",
            auth="off",
        )
        == key()
    )


def test_a_path_that_is_no_file_is_said(shelf: Shelf) -> None:
    shelf.path.mkdir()
    with pytest.raises(VolumeError, match="profile cannot be read") as caught:
        shelf.store.load(key())
    assert caught.value.exit_code == 50


def test_a_profile_that_no_longer_holds_is_marked_until_it_is_measured_again(shelf: Shelf) -> None:
    old = profile()
    assert not shelf.store.mark_stale(old, "slow")  # there is none
    shelf.store.save(old)
    assert shelf.store.why_stale(old) is None
    assert shelf.store.mark_stale(old, "24 % slower, „zweimal“")
    assert shelf.store.mark_stale(old, "30 % slower")
    assert shelf.store.why_stale(old) == "30 % slower"
    assert shelf.store.load(key()) == old  # it is kept: whoever may not measure serves it
    new = profile(speed="slower")
    shelf.store.save(new)
    assert shelf.store.why_stale(new) is None
    assert not shelf.path.with_suffix(".stale").exists()


def test_a_mark_that_comes_late_does_not_touch_what_another_measured_meanwhile(shelf: Shelf) -> None:
    old, new = profile(), profile(speed="new")
    shelf.store.save(old)
    shelf.store.save(new)
    assert not shelf.store.mark_stale(old, "slow")
    assert shelf.store.why_stale(new) is None
    shelf.store.mark_stale(new, "slow")
    data = shelf.path.with_suffix(".stale").read_bytes()
    shelf.store.save(old)
    shelf.path.with_suffix(".stale").write_bytes(data)  # as if the process had died before it removed the mark
    assert shelf.store.why_stale(old) is None


def test_forgetting_removes_the_mark_too_and_a_pinned_one_keeps_it(shelf: Shelf) -> None:
    shelf.store.save(profile())
    shelf.store.mark_stale(profile(), "slow")
    shelf.store.pin(key().id)
    assert not shelf.store.save(profile(speed="new"))
    assert shelf.store.why_stale(profile()) == "slow"
    shelf.store.forget(key().id)
    assert [path.suffix for path in shelf.folder.iterdir()] == [".lock"]


@given(st.one_of(st.binary(max_size=200), json_values.map(lambda value: json.dumps(value).encode())))
def test_any_bytes_in_the_place_of_a_mark_count_as_none(long_shelf: Shelf, data: bytes) -> None:
    long_shelf.path.write_bytes(DATA)
    long_shelf.path.with_suffix(".stale").write_bytes(data)
    assert long_shelf.store.why_stale(profile()) is None


def test_a_mark_that_cannot_be_read_is_said(shelf: Shelf) -> None:
    shelf.store.save(profile())
    shelf.path.with_suffix(".stale").mkdir()
    with pytest.raises(VolumeError, match=r"mark of a stale profile cannot be read: .*Is a directory"):
        shelf.store.why_stale(profile())


def kept(shelf: Shelf) -> Path:
    return shelf.path.with_suffix(".partial")


KEPT = dump_partial(key(), PARTIAL).encode()


def test_what_was_found_out_is_kept_until_there_is_a_profile(shelf: Shelf) -> None:
    assert shelf.store.kept(key()) == Partial()
    shelf.store.keep(key(), Partial(measurements=PARTIAL.measurements))
    shelf.store.keep(key(), PARTIAL)
    assert shelf.store.kept(key()) == PARTIAL
    assert shelf.store.kept(key("b2")) == Partial()
    assert (shelf.store.load(key()), shelf.store.all(), shelf.store.foreign()) == (None, (), ())
    assert shelf.store.save(profile())
    assert shelf.store.kept(key()) == Partial()
    assert not kept(shelf).exists()
    assert shelf.warnings == []


def test_an_unfinished_profile_keeps_what_the_next_day_goes_on_from(shelf: Shelf) -> None:
    shelf.store.keep(key(), PARTIAL)
    assert shelf.store.save(replace(profile(), goes_on_from="2026-11-29"))
    assert shelf.store.kept(key()) == PARTIAL
    assert getattr(shelf.store.load(key()), "goes_on_from", None) == "2026-11-29"
    assert shelf.store.save(profile())
    assert shelf.store.kept(key()) == Partial()


@pytest.mark.parametrize("day", ["", "tomorrow", "2026-13-01", "20261129"])
def test_a_profile_that_goes_on_from_no_day_is_none(day: str) -> None:
    with pytest.raises(ValueError, match="Profile"):
        parse_profile(dump_profile(replace(profile(), goes_on_from=day)))


def test_what_is_there_is_told_in_words() -> None:
    words = "3 measurements, 2 chunks of text, 3 trials of speculative decoding, 2 trials of slots"
    assert (PARTIAL.describe(), Partial().describe()) == (words, "")
    assert replace(PARTIAL, drafts=PARTIAL.drafts[:1], measurements=(), slots=()).describe() == (
        "2 chunks of text, 1 trial of speculative decoding"
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (dump_partial(key("b2"), PARTIAL).encode(), "it is for another key"),
        (KEPT.replace(b'"schema": %d' % SCHEMA, b'"schema": 99'), f"schema is 99, expected {SCHEMA}"),
        (KEPT.replace(b'"ngram"', b'"magic"'), "Invalid enum value 'magic' - at `$.drafts[1].tried.kind`"),
        (KEPT.replace(b"510.5", b"-510.5"), "Partial.drafts[0].tried.answers[0] cannot be: Answer("),
        (b"\xff\xfe", "can't decode"),
        (b"[" * 100_000, "it is nested too deep"),
    ],
)
def test_what_was_kept_and_is_none_of_ours_is_set_aside_with_its_reason(shelf: Shelf, data: bytes, why: str) -> None:
    kept(shelf).write_bytes(data)
    assert shelf.store.kept(key()) == Partial()
    aside = shelf.path.with_suffix(".partial-corrupt")
    (said,) = shelf.warnings
    assert f"what was measured before is set aside as {aside.name}, measuring again: " in said
    assert why in said
    assert not kept(shelf).exists()
    assert aside.read_bytes() == data
    shelf.store.keep(key(), PARTIAL)
    assert shelf.store.kept(key()) == PARTIAL


def test_what_was_kept_and_is_torn_is_measured_again_and_written_anew(shelf: Shelf) -> None:
    data = dump_partial(key(), PARTIAL).encode()
    for length in (*range(0, len(data) - 1, 37), len(data) - 2):
        shelf.warnings.clear()
        kept(shelf).write_bytes(data[:length])
        assert shelf.store.kept(key()) == Partial()
        assert len(shelf.warnings) == 1
    shelf.store.keep(key(), PARTIAL)
    assert shelf.store.kept(key()) == PARTIAL


@pytest.mark.thorough
@settings(max_examples=examples(500))
@given(st.data())
def test_damage_to_what_was_kept_is_a_value_error_and_nothing_else(data: st.DataObject) -> None:
    document = json.loads(dump_partial(key(), PARTIAL))
    place: Any = document
    while isinstance(place, dict | list) and place:
        name = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[name], dict | list) or data.draw(st.booleans()):
            place[name] = data.draw(json_values)
            break
        place = place[name]
    try:
        found = parse_partial(json.dumps(document), key())
    except ValueError:
        return
    assert {type(each) for each in found.measurements} <= {Measurement}
    assert all(each.describe() and each.disturbance != "" for each in found.measurements)
    assert all(look.tried.describe() for look in found.drafts)
    assert all(look.found is None or look.found.cost_s > 0 for look in found.slots)
    assert found.describe()


def test_a_forgotten_profile_takes_with_it_what_was_kept(shelf: Shelf) -> None:
    shelf.store.save(profile())
    shelf.store.keep(key(), PARTIAL)
    shelf.store.forget(key().id)
    assert not kept(shelf).exists()


@pytest.mark.parametrize(
    ("old", "new", "is_saved"),
    [(None, "heat", True), ("heat", "steal", True), ("heat", None, True), (None, None, True)],
)
def test_what_was_disturbed_is_saved_where_nothing_better_is(
    shelf: Shelf, old: str | None, new: str | None, is_saved: bool
) -> None:
    if old:
        assert shelf.store.save(profile(speed="old", disturbance=old))
    assert shelf.store.save(profile(speed="new", disturbance=new)) is is_saved
    assert shelf.store.load(key()) == profile(speed="new", disturbance=new)


def test_what_was_disturbed_never_replaces_what_was_not(shelf: Shelf) -> None:
    shelf.store.save(profile(speed="calm"))
    shelf.store.keep(key(), PARTIAL)
    assert shelf.store.save(profile(speed="busy", disturbance="other programs took 40% of 8 CPUs")) is False
    assert shelf.store.load(key()) == profile(speed="calm")
    assert shelf.store.kept(key()) == Partial(), "a tuning that has ended does not go on"
    assert shelf.store.save(profile(speed="calm again"))
    assert shelf.store.load(key()) == profile(speed="calm again")


def test_conditions_say_what_spoilt_a_measurement() -> None:
    busy, quiet = measured(profile().plan, conditions=BUSY), measured(profile().plan, conditions=QUIET)
    assert quiet.disturbance is None
    assert "other programs took 40% of 8 CPUs" in (busy.disturbance or "")
    assert busy.describe().endswith(f"(disturbed: {busy.disturbance})")
    assert parse_profile(TEXT).measurements[2].disturbance == busy.disturbance


def test_a_profile_of_an_engine_that_is_not_here_is_left_alone(shelf: Shelf) -> None:
    shelf.store.save(profile(key("b2")))
    shelf.store.pin(key("b2").id)
    path = shelf.folder / f"{key('b2').id}.json"
    other = path.read_bytes().replace(b'"engine": "llama"', b'"engine": "of-tomorrow"')
    path.write_bytes(other)
    assert shelf.store.load(key()) is None
    assert shelf.store.all() == ()
    assert [(each.id, each.schema) for each in shelf.store.foreign()] == [(key("b2").id, f"{SCHEMA} of another engine")]
    assert path.read_bytes() == other
    assert shelf.warnings == []


CHECKED = Checks(needles=(NeedleRow(context=4096, share=0.5, verdict="failed", words="not found"),))


def test_checks_are_kept_and_marks_and_time_stay(shelf: Shelf) -> None:
    shelf.store.save(profile())
    shelf.store.pin(key().id)
    shelf.store.mark_stale(profile(), "slower")
    before_ns = shelf.path.stat().st_mtime_ns
    checked = replace(profile(), checks=CHECKED)
    assert shelf.store.save_checks(checked)
    assert shelf.store.load(key()) == checked
    assert (shelf.store.why_stale(checked), shelf.store.is_pinned(key().id)) == ("slower", True)
    assert shelf.path.stat().st_mtime_ns == before_ns


def test_checks_of_a_profile_that_is_gone_or_measured_anew_are_dropped(shelf: Shelf) -> None:
    checked = replace(profile(), checks=CHECKED)
    assert not shelf.store.save_checks(checked)
    assert not shelf.path.exists()
    newer = replace(profile(), created="2027-01-01T00:00:00+00:00")
    shelf.store.save(newer)
    assert not shelf.store.save_checks(checked)
    assert shelf.store.load(key()) == newer
