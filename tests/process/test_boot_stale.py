"""A profile that no longer holds, through the whole start: measured again, or used and said so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.image_facts import dump_facts, parse_engine_facts
from appliance.profile import Profile, ProfileStore, parse_profile
from tests.process.stages.boot import Home, Serving, eventually

PATIENCE_S = 300.0  # a probe waits while other programs are at work
BESIDE = "; it counts for nothing: "
NOT_BEGUN = ": not begun; "  # repeated at growing intervals, which no test waits for
NO_MORE = "probes decided nothing; there are no more before the next start"
WORDS = "decoded 12.1 tok/s at 1,900 tokens, 16.0 measured: 24 % slower, twice"


@pytest.fixture
def home(tuned: Home, tmp_path: Path) -> Home:
    """Return a home whose profile is marked stale."""
    home = tuned.copy(tmp_path / "home")
    assert ProfileStore(home.profiles, pytest.fail).mark_stale(only_profile(home), WORDS)
    return home


@pytest.fixture
def busy() -> Iterator[None]:
    """Others' work on half of the CPUs at least, which is ten times of what counts."""
    count = (len(os.sched_getaffinity(0)) + 1) // 2
    others = [subprocess.Popen((sys.executable, "-I", "-S", "-c", "while True: pass")) for _ in range(count)]
    yield
    for other in others:
        other.kill()
        other.wait()


def only_profile(home: Home) -> Profile:
    (path,) = home.profiles.glob("*.json")
    return parse_profile(path.read_text())


def why_stale(home: Home) -> str | None:
    return ProfileStore(home.profiles, pytest.fail).why_stale(only_profile(home))


def was_replaced(serving: Serving, old: Profile) -> bool:
    """True if a start that is ready has replaced the stale profile. False if the machine was busy, or if it became busy
    while measuring and the old profile was undisturbed. Fails if the log says otherwise."""
    said = serving.event("profile_stale")["message"]
    assert said.startswith(f"profile {old.key.id} is stale: ")
    has_measured = said.endswith("; nothing else is at work: measuring again")
    names = serving.names()
    assert names.count("profile_stale") == 1
    assert "profile_unused" not in names
    assert [name in names for name in ("tune_start", "tuned", "profile_used")] == [
        has_measured,
        has_measured,
        not has_measured,
    ]
    was_disturbed = "provisional" in names
    assert has_measured or not was_disturbed
    assert has_measured or "; used for now, because the machine is busy: " in said
    return has_measured and not (was_disturbed and old.disturbance is None)


def test_a_start_that_may_measure_does_so_again_says_why_and_then_it_holds(home: Home) -> None:
    before = only_profile(home)
    with home.serving(tune="first") as serving:
        serving.wait_ready()
        is_replaced = was_replaced(serving, before)
        serving.terminate()
    after = only_profile(home)
    assert after.key == before.key
    assert (after.seconds != before.seconds) is is_replaced
    assert why_stale(home) == (None if is_replaced else WORDS)
    with home.serving(tune="first") as serving:
        serving.wait_ready()
        if is_replaced:
            assert "profile_used" in serving.names()
            assert not {"tune_start", "profile_stale"} & set(serving.names())
        else:
            assert WORDS in serving.event("profile_stale")["message"]
        serving.terminate()


@pytest.mark.usefixtures("busy")
def test_on_a_busy_machine_it_is_used_at_once_says_why_and_stays_stale(home: Home) -> None:
    before = only_profile(home)
    for _ in range(2):  # at no start is the budget spent
        with home.serving(tune="first") as serving:
            serving.wait_ready()
            assert not was_replaced(serving, before)
            said = serving.event("profile_stale")
            assert said["level"] == "warning"
            assert "; used for now, because the machine is busy: " in said["message"]
            assert "tune_start" not in serving.names()
            assert serving.document("status")["standing"]["stale"] == WORDS
            serving.terminate()
    assert only_profile(home) == before
    assert why_stale(home) == WORDS


def test_a_provisional_one_of_yesterday_is_measured_once_more_unless_the_machine_is_busy(
    tuned: Home, tmp_path: Path
) -> None:
    home = tuned.copy(tmp_path / "home")
    (path,) = home.profiles.glob("*.json")
    spoilt = "the hypervisor took the CPU away"
    made_up = {"disturbance": spoilt, "disturbed_times": 1, "created": "2026-01-01T00:00:00+00:00"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **made_up}))
    shown = home.command("plan")
    assert f"\n  provisional: {spoilt} when it was measured\n" in shown.stdout
    standing = {"stale": None, "provisional": spoilt, "pinned": False}
    assert json.loads(home.command("plan", "--json").stdout)["standing"] == standing
    with home.serving(tune="first") as serving:
        serving.wait_ready()
        said = serving.event("profile_provisional")["message"]
        assert said.startswith(f"profile {path.stem} is provisional: {spoilt} when it was measured; ")
        was_quiet = said.endswith("nothing else is at work: measuring again")
        assert ("tune_start" in serving.names()) is was_quiet
        assert ("profile_used" in serving.names()) is not was_quiet
        if not was_quiet:
            assert serving.document("status")["standing"] == serving.document("profile")["standing"] == standing
        serving.terminate()
    after = only_profile(home)
    if was_quiet:  # a second disturbed measurement is not repeated
        assert after.disturbed_times == (2 if after.disturbance else 0)


def test_with_measuring_off_it_is_used_and_said(home: Home) -> None:
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        said = serving.event("profile_stale")
        assert said["message"].endswith(f"{WORDS}; measuring is off, so it is still used")
        assert said["level"] == "warning"
        assert "tune_start" not in serving.names()
        assert serving.document("status")["from_profile"] is True
        serving.terminate()
    assert why_stale(home) == WORDS
    assert f"\n  stale: {WORDS}\n" in home.command("plan").stdout


def test_a_pinned_one_is_never_measured_again(home: Home) -> None:
    name = only_profile(home).key.id
    assert home.command("profiles", "pin", name).returncode == 0
    with home.serving(tune="first") as serving:
        serving.wait_ready()
        said = serving.event("profile_stale")
        assert f"{WORDS}; it is pinned, so it is still used" in said["message"]
        assert said["level"] == "warning"
        assert "tune_start" not in serving.names()
        standing = {"stale": WORDS, "provisional": only_profile(home).disturbance, "pinned": True}
        assert serving.document("status")["standing"] == serving.document("profile")["standing"] == standing
        assert home.command("profiles", "unpin", name).returncode == 0
        assert serving.document("status")["standing"] == {**standing, "pinned": False}
        serving.terminate()
    assert why_stale(home) == WORDS


def test_while_another_measures_it_again_it_is_used_at_once(home: Home) -> None:
    """This process holds the lock of measuring, because a start would measure only on a quiet machine."""
    store = ProfileStore(home.profiles, pytest.fail)
    with store.tuning(only_profile(home).key) as is_ours, home.serving(tune="first") as serving:
        assert is_ours
        serving.wait_ready()
        said = serving.event("profile_stale")["message"]
        assert said.endswith("another container on this volume is measuring again, used until the next start")
        assert "profile_used" in serving.names()
        assert "tune_start" not in serving.names()
        serving.terminate()
    assert why_stale(home) == WORDS


class Probes:
    """Probes of an engine that takes `times` as long as when it was measured, once `slow_down(times)` was called."""

    def __init__(self, home: Home, folder: Path, *knobs: str) -> None:
        self._slowdown = folder / "slowdown"
        home.set_engine(*knobs, "--slowdown", str(self._slowdown))

    def slow_down(self, times: float) -> None:
        self._slowdown.write_text(f"{times}")

    @staticmethod
    def of(serving: Serving) -> tuple[list[str], list[str]]:
        """Return the messages of undisturbed probes, and those of disturbed ones."""
        said = [event["message"] for event in serving.events if event["event"] == "profile_probed"]
        said = [words for words in said if NO_MORE not in words]
        return [words for words in said if BESIDE not in words], [words for words in said if BESIDE in words]

    def until(self, serving: Serving, verdict: str) -> None:
        """Wait for the verdict. Skips the test if the machine was never quiet for long enough."""

        def is_told() -> bool:
            return f"profile_{verdict}" in serving.names() or NO_MORE in serving.text or NOT_BEGUN in serving.text

        eventually(is_told, timeout_s=PATIENCE_S, what=lambda: serving.text)
        if f"profile_{verdict}" not in serving.names():
            assert self.of(serving)[1], "nothing was said of other work"
            pytest.skip(f"what is measured beside others counts for nothing: {self.of(serving)[1][0]}")


@pytest.mark.parametrize(("times", "verdict"), [(2.0, "stale"), (1.0, "holds")])
def test_two_probes_while_nobody_asks_decide_whether_it_holds(
    tuned: Home, tmp_path: Path, times: float, verdict: str
) -> None:
    home = tuned.copy(tmp_path / "home")
    profile = only_profile(home)
    probes = Probes(home, tmp_path)
    probes.slow_down(times)
    with home.serving(tune="first", idle_s="1") as serving:
        serving.wait_ready()
        # The machine is new here: its bandwidths are measured first.
        eventually(lambda: serving.document("status")["profile_holds"] in ("open", verdict))
        probes.until(serving, verdict)
        assert serving.document("status")["profile_holds"] == verdict
        assert len(probes.of(serving)[0]) == 2
        eventually(lambda: (why_stale(home) is not None) is (verdict == "stale"))
        serving.terminate()
    words = why_stale(home)
    if verdict == "stale":
        assert words is not None
        assert words.endswith(" % slower, twice")
        home.set_engine()
        with home.serving(tune="first") as serving:
            serving.wait_ready()
            is_replaced = was_replaced(serving, profile)
            serving.terminate()
        assert why_stale(home) == (None if is_replaced else words)


def test_with_guesses_on_half_the_speed_is_found_as_well(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    path = home.folder / "facts/engine_facts.json"
    facts = parse_engine_facts(path.read_text())
    flags = (*facts.flags, "--spec-type", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-min")
    path.write_text(dump_facts(replace(facts, flags=flags)))
    probes = Probes(home, tmp_path, "--guess", "ngram-mod:0.1,0.9")
    done = home.command("tune", speculation="ngram", budget_s="60")
    assert done.returncode == 0, done.stderr
    home.calm()
    probes.slow_down(2)
    with home.serving(tune="first", idle_s="1", speculation="ngram") as serving:
        serving.wait_ready()
        assert serving.document("plan")["speculation"]["kind"] == "ngram"
        probes.until(serving, "stale")
        assert len(probes.of(serving)[0]) == 2
        serving.terminate()


@pytest.mark.usefixtures("busy")
def test_beside_a_neighbour_half_the_speed_is_no_reason(tuned: Home, tmp_path: Path) -> None:
    home = tuned.copy(tmp_path / "home")
    probes = Probes(home, tmp_path)
    probes.slow_down(2)
    with home.serving(tune="first", idle_s="1") as serving:
        serving.wait_ready()
        eventually(lambda: probes.of(serving)[1], what=lambda: serving.text)
        assert serving.document("status")["profile_holds"] == "open"
        assert probes.of(serving)[0] == []
        assert "profile_stale" not in serving.names()
        serving.terminate()
    assert why_stale(home) is None


def test_a_request_that_comes_during_a_probe_is_answered_at_once(tuned: Home, tmp_path: Path) -> None:
    home = tuned.copy(tmp_path / "home")
    home.set_engine("--hang-on-completion")  # no probe would ever end
    with home.serving(tune="first", idle_s="1", check_profile="off") as serving:
        serving.wait_ready()
        eventually(lambda: serving.engine_requests().get("POST /completion") == 1 or BESIDE in serving.text)
        if BESIDE in serving.text:
            pytest.skip(f"beside others no probe is begun: {serving.text}")
        assert serving.chat()[0] == 200
        assert serving.event("profile_probed")["message"].endswith(": given up, since a request came")
        # The machine is new here: its bandwidths are measured first.
        eventually(lambda: serving.document("status")["profile_holds"] == "open")
        serving.terminate()
