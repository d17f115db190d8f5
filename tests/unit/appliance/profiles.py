"""Made-up profiles, for tests and for the processes that tests start."""

from __future__ import annotations

from dataclasses import replace

from appliance.tune.search import Measurement, Point
from facts import ENGINE, IMAGE, SMALL, machine

from appliance.engines.llama_server import Allocated
from appliance.model import ModelDigest
from appliance.plan import plan
from appliance.profile import Key, Profile, make_key
from appliance.settings import resolve_settings

DIGEST = ModelDigest(size=98_362_432, header_sha256="0" * 64, samples_sha256="1" * 64)


def key(build_id: str = "b1", memory_mib: int = 16384, size: int = DIGEST.size, **settings: str) -> Key:
    image = replace(IMAGE, build_id=build_id)
    return make_key(resolve_settings(settings, {}), image, machine(total_mib=memory_mib), replace(DIGEST, size=size))


def profile(of: Key | None = None, *, created: str = "2026-01-01T00:00:00+00:00", speed: str = "fast") -> Profile:
    points = tuple(Point(depth=d, decode_ms=d / 7, prefill_ms=1.5, prefill_tokens=d) for d in (32, 512, 2048))
    allocated = Allocated(model=92.1, kv=180.0, compute=15.51, output=0.75)
    good = Measurement(threads=4, ubatch=512, points=points, load_s=0.8, seconds=9.5, allocated=allocated)
    bad = Measurement(threads=8, ubatch=512, error="engine exited with code 1: „schade“")
    return Profile(
        key=of or key(),
        plan=plan(resolve_settings({}, {}), IMAGE, ENGINE, machine(), SMALL)[0],
        measurements=(good, bad),
        job_s=3.25,
        workload="chat",
        speed=speed,
        seconds=31.0,
        stopped_by="everything measured",
        created=created,
        allocated=allocated,
    )
