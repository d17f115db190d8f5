"""Made-up profiles, for tests and for the processes that tests start."""

from __future__ import annotations

from dataclasses import replace

from facts import ENGINE, IMAGE, SMALL, machine

from appliance.engines.llama.planning.space import Space
from appliance.model import ModelDigest
from appliance.plan import Allocated, Plan, Verdict
from appliance.probe import GpuHolder
from appliance.probe.conditions import Conditions, GpuConditions
from appliance.profile import Key, Profile, make_key
from appliance.settings import resolve_settings
from appliance.tune.curve import Point
from appliance.tune.measurement import Measurement
from appliance.tune.paired import Passage
from appliance.tune.partial import GuessLook, Partial, SlotsLook
from appliance.tune.slots import Concurrency, Job
from appliance.tune.speculate import Answer, Tried
from appliance.tune.workload import CHAT

VERDICT = Verdict(
    kv_type="q4_0", is_accepted=False, why="it costs 3.6 %", tokens=4080, pieces=16, difference=0.035,
    standard_error=0.004, seconds=40.0,
)  # fmt: skip
DIGEST = ModelDigest(size=98_362_432, header_sha256="0" * 64, samples_sha256="1" * 64)
SPACE = Space(resolve_settings({}, {}), IMAGE, ENGINE, machine(), SMALL)
BUSY = Conditions(interval_s=9.5, cpus=8, own_cpu=0.5, foreign_cpu=0.4, steal=0.0)
CARD = GpuConditions(index=0, uuid="GPU-0", clock_share=0.9, foreign=(GpuHolder(pid=7, name="x", used_mib=None),))
QUIET = Conditions(interval_s=9.5, cpus=8, own_cpu=0.5, foreign_cpu=0.01, gpus=(CARD,))


def key(build_id: str = "b1", memory_mib: int = 16384, size: int = DIGEST.size, **settings: str) -> Key:
    image = replace(IMAGE, build_id=build_id)
    return make_key(resolve_settings(settings, {}), image, machine(total_mib=memory_mib), replace(DIGEST, size=size))


def measured(plan: Plan, *, faster: float = 1.0, conditions: Conditions | None = QUIET) -> Measurement:
    points = tuple(Point(depth=d, decode_ms=d / 7 / faster, prefill_ms=1.5, prefill_tokens=d) for d in (32, 512, 2048))
    allocated = Allocated(model=92.1, kv=180.0, compute=15.51, output=0.75)
    return Measurement(
        key=plan.key,
        points=points,
        is_long=True,
        load_s=0.8,
        seconds=9.5,
        allocated=allocated,
        conditions=conditions,
    )


def profile(
    of: Key | None = None,
    *,
    created: str = "2026-01-01T00:00:00+00:00",
    speed: str = "fast",
    disturbance: str | None = None,
) -> Profile:
    """The best, one that is nearly as fast, and one that failed."""
    best, second, failed, *_ = SPACE.all()
    good = measured(best)
    words = "engine exited with code 1: „schade“"
    bad = Measurement(key=failed.key, error=words, seconds=0.1, lacking_device="CUDA0", lacking_mib=12.5)
    return Profile(
        key=of or key(),
        plan=best,
        plans=(best, second),
        measurements=(good, bad, measured(second, faster=0.9, conditions=BUSY)),
        verdicts=(VERDICT,),
        notes=("no draft tokens: 8.1 ms a token, 12 answers",),
        mode="balanced",
        workload="chat",
        native=8192,
        job_s=3.25,
        speed=speed,
        seconds=31.0,
        stopped_by="everything that may fit was measured",
        created=created,
        allocated=good.allocated,
        disturbance=disturbance,
        other_modes=("context",),
    )


def partial() -> Partial:
    """Something of each kind, a failure among each."""
    best = SPACE.best.key
    texts = [(best, (3.1, 2.9), None), (SPACE.all()[1].key, (), "engine was killed by SIGKILL")]
    passages = (Passage(key=k, piece_tokens=256, first=0, nll=nll, error=why) for k, nll, why in texts)
    answer = Answer(name="chat: tides", made=63, ms=510.5, drafted=40, accepted=31, is_looping=False)
    tried = (
        Tried(kind=None, tokens=0, tokens_each=64, answers=(replace(answer, drafted=0, accepted=0),), seconds=3.5),
        Tried(kind="ngram", tokens=8, tokens_each=64, answers=(answer,), seconds=3.1),
        Tried(kind="mtp", tokens=1, error="engine exited with code 1: „schade“"),
    )
    jobs = tuple(Job(seconds=s, ttft_s=0.5, decode_ms=20.0, tokens_read=500, tokens_cached=12) for s in (6.0, 7.5))
    return Partial(
        measurements=profile().measurements,
        passages=tuple(passages),
        guesses=tuple(GuessLook(key=best, tried=each) for each in tried),
        slots=(
            SlotsLook(key=best, slots=3, found=Concurrency(slots=3, workload=CHAT, jobs=jobs, load_s=0.8)),
            SlotsLook(key=best, slots=1, error="engine made no progress for 60 s while it was measured"),
        ),
    )


PARTIAL = partial()
