"""Made-up machines and models for tests of what follows from them. Sizes are those of real kinds."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings

from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.facts import parse_facts
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model, ModelDigest, read_model
from appliance.plan import Allocated, Device, KvCheck, Plan
from appliance.probe import Cpu, Gpu, GpuHolder, GpuProbe, Hardware, Memory, Volume
from appliance.probe.load.conditions import Conditions, GpuConditions
from appliance.profile import Key, Profile, make_key
from appliance.settings import resolve_settings
from appliance.tune.checkpoint import DraftTrial, Partial, SlotsTrial
from appliance.tune.figures.curve import Point
from appliance.tune.figures.measurement import Measurement
from appliance.tune.figures.perplexity import ScoredChunk
from appliance.tune.figures.slots import Concurrency, Job
from appliance.tune.figures.workload import CHAT
from appliance.tune.speculate import Answer, Tried
from tests.shapes import PUBLISHED, write_gguf

T = TypeVar("T")


def device(id: str = "GPU-0", *, free_mib: float = 8000.0, index: int = 0, gb_s: float = 900.0) -> Device:
    """Return a GPU in the form that plans use."""
    return Device(
        id=id,
        name=id,
        index=index,
        free_mib=free_mib,
        held_back_mib=0.0,
        bandwidth_gb_s=gb_s,
        upload_gb_s=6.0,
        pinned_gb_s=12.0,
    )


def examples(most: int) -> int:
    """Return `most`, scaled by the examples of the profile in use; 100 examples mean all."""
    return max(1, most * settings().max_examples // 100)


def some(cases: Sequence[T]) -> Sequence[T]:
    """Return all cases, or every fifth if the profile in use takes fewer than 100 examples."""
    return cases if settings().max_examples >= 100 else cases[::5]


IMAGE = ImageFacts(
    build_id="b1", cell="llama-cpu", engine="llama", engine_version="1", engine_build=1, engine_commit="abc"
)
VERSION = "version: 0.5.0-dev (build 11312, commit 0c1e57098)"
USAGE = (Path(__file__).parent / "data/llama-server-help.txt").read_text()
ENGINE: EngineFacts = parse_facts(version=VERSION, usage=USAGE)


def with_variants(*names: str) -> EngineFacts:
    """Return an engine whose folder holds these CPU variants."""
    backends = tuple(f"libggml-cpu-{name}.so" for name in names)
    return parse_facts(version=VERSION, usage=USAGE, backends=backends)


SMALL = Model(
    path=Path("/data/models/small.gguf"),
    parts=(Path("/data/models/small.gguf"),),
    format="gguf",
    architecture="llama",
    name="small",
    file_bytes=98_362_432,
    header_bytes=1_700_000,
    weights_bytes=96_576_768,
    bytes_by_type=(("q4_1", 66_000_000), ("q8_0", 30_000_000)),
    quantization="q4_1",
    matrices=(),
    layers=30,
    embedding_length=576,
    feed_forward_length=1536,
    heads=9,
    kv_heads=(3,) * 30,
    key_length=64,
    value_length=64,
    native_context=8192,
    vocabulary=49152,
    experts=0,
    experts_used=0,
    expert_bytes=0,
    output_is_tied=True,
    has_chat_template=True,
    is_embedding_model=False,
    cache_kind="attention",
    cache_reason=None,
)
LARGE = replace(
    SMALL,
    path=Path("/data/models/large.gguf"),
    name="8B at Q4_K_M, the shape of Llama 3.1",
    weights_bytes=4_920_000_000,
    layers=32,
    embedding_length=4096,
    feed_forward_length=14336,
    heads=32,
    kv_heads=(8,) * 32,
    key_length=128,
    value_length=128,
    native_context=131072,
    vocabulary=128256,
)


# What every machine that a test may meet can run, so that what is planned is the same on most.
PLAIN = ("x64", "haswell")
BUILT = {
    "amd64": ("x64", "haswell", "alderlake", "skylakex", "cascadelake", "icelake", "zen4", "sapphirerapids"),
    "arm64": ("armv8.0_1", "armv8.2_2", "armv8.6_2"),
}


@cache
def facts(*, has_cuda: bool, variants: tuple[str, ...] = PLAIN) -> tuple[ImageFacts, EngineFacts]:
    image = ImageFacts(
        build_id="golden",
        cell="llama-cuda" if has_cuda else "llama-cpu",
        engine="llama",
        engine_version="1",
        engine_build=1,
        engine_commit="0",
    )
    backends = (*(f"libggml-cpu-{name}.so" for name in variants), *(("libggml-cuda.so",) if has_cuda else ()))
    engine = parse_facts(version=VERSION, usage=USAGE, backends=backends)
    equal = tuple((kind, kind) for kind in ("f16", "bf16", "q8_0", "q4_0"))
    fast = (*equal, ("q8_0", "q4_0")) if has_cuda else ()  # as build_matrix.yaml has them
    return image, replace(engine, kv_pairs=fast)


@cache
def model(name: str, quantization: str) -> Model:
    """Return the model that its GGUF header describes; its path lies under /data/models."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / f"{name}-{quantization}.gguf", PUBLISHED[name], quantization=quantization)
        found = read_model(path)
    path = Path("/data/models") / path.name
    return replace(found, path=path, parts=(path,))


def facts_for(hardware: Hardware) -> tuple[ImageFacts, EngineFacts]:
    """Return the facts of the image that is built for this kind of machine."""
    variants = BUILT["arm64" if "asimd" in hardware.cpu.isa else "amd64"]
    return facts(has_cuda=bool(hardware.gpus.gpus), variants=variants)


def machine(
    *,
    total_mib: int = 16384,
    limit_mib: int | None = None,
    logical: int = 8,
    physical: int = 4,
    quota: float | None = None,
    isa: tuple[str, ...] = ("avx2",),
    taken_mib: int = 500,
    limit_used_mib: int = 50,
    volume_mib: int = 2000,
) -> Hardware:
    """Return a machine without a GPU; half of its volume is free."""
    return Hardware(
        cpu=Cpu(model_name="test", logical=logical, physical=physical, quota=quota, isa=isa),
        memory=Memory(
            total_mib=total_mib,
            available_mib=total_mib - taken_mib,
            limit_mib=limit_mib,
            limit_used_mib=None if limit_mib is None else limit_used_mib,
            memlock_limit_mib=8,
        ),
        numa=(),
        volume=Volume(path=Path("/data"), free_mib=volume_mib // 2, total_mib=volume_mib, is_writable=True),
        gpus=GpuProbe(),
        gpu_requested=False,
    )


def card(index: int = 0, **given: Any) -> Gpu:
    """Return a whole GPU with its own memory; `given` replaces its fields."""
    usual: dict[str, Any] = {
        "index": index, "name": "Test 9000", "uuid": f"GPU-b0d5a1c2-1111-2222-3333-44445555666{index}", "sm": "86",
        "vram_total_mib": 24576, "vram_free_mib": 24000, "pci_bus_id": f"00000000:0{index + 1}:00.0",
        "pcie_generation": 4, "pcie_width": 16, "pcie_generation_max": 4, "pcie_width_max": 16,
        "power_limit_w": 350.0, "power_limit_default_w": 350.0, "ecc": False, "display": False,
        "bandwidth_gb_s": 936.1, "bandwidth_source": "memory clock x bus width",
    }  # fmt: skip
    return Gpu(**(usual | given))


VERDICT = KvCheck(
    kv_type="q4_0", is_accepted=False, why="it costs 3.6 %", tokens=4080, chunks=16, difference=0.035,
    standard_error=0.004, seconds=40.0,
)  # fmt: skip
DIGEST = ModelDigest(size=98_362_432, header_sha256="0" * 64, samples_sha256="1" * 64)
SPACE = Space(resolve_settings({}, {}), IMAGE, ENGINE, machine(), SMALL)
PLANS = tuple(SPACE.all())
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
    """Return a profile of three plans: the best, one that is nearly as fast, and one that failed."""
    best, second, failed, *_ = PLANS
    good = measured(best)
    words = "engine exited with code 1: „schade“"
    bad = Measurement(key=failed.key, error=words, seconds=0.1, lacking_device="CUDA0", lacking_mib=12.5)
    return Profile(
        key=of or key(),
        plan=best,
        plans=(best, second),
        measurements=(good, bad, measured(second, faster=0.9, conditions=BUSY)),
        kv_checks=(VERDICT,),
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
    """Return an unfinished tuning with results of each kind, a failure among each."""
    best = SPACE.best.key
    texts = [(best, (3.1, 2.9), None), (PLANS[1].key, (), "engine was killed by SIGKILL")]
    scored_chunks = (ScoredChunk(key=k, chunk_tokens=256, first=0, nll=nll, error=why) for k, nll, why in texts)
    answer = Answer(name="chat: tides", made=63, ms=510.5, drafted=40, accepted=31, is_looping=False)
    tried = (
        Tried(kind=None, tokens=0, tokens_each=64, answers=(replace(answer, drafted=0, accepted=0),), seconds=3.5),
        Tried(kind="ngram", tokens=8, tokens_each=64, answers=(answer,), seconds=3.1),
        Tried(kind="mtp", tokens=1, error="engine exited with code 1: „schade“"),
    )
    jobs = tuple(Job(seconds=s, ttft_s=0.5, decode_ms=20.0, tokens_read=500, tokens_cached=12) for s in (6.0, 7.5))
    return Partial(
        measurements=profile().measurements,
        scored_chunks=tuple(scored_chunks),
        drafts=tuple(DraftTrial(key=best, tried=each) for each in tried),
        slots=(
            SlotsTrial(key=best, slots=3, found=Concurrency(slots=3, workload=CHAT, jobs=jobs, load_s=0.8)),
            SlotsTrial(key=best, slots=1, error="engine made no progress for 60 s while it was measured"),
        ),
    )


PARTIAL = partial()
