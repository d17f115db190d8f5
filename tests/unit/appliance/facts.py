"""Made-up machines and models for tests of what follows from them. Sizes are those of real kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from appliance.engines.llama.facts import parse_facts
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model
from appliance.probe import Cpu, GpuProbe, Hardware, Memory, Volume

IMAGE = ImageFacts(
    build_id="b1", cell="llama-cpu", engine="llama", engine_version="1", engine_build=1, engine_commit="abc"
)
USAGE = (Path(__file__).parent / "llama-server-help.txt").read_text()
ENGINE: EngineFacts = parse_facts(version="version: 0.5.0-dev (build 11312, commit 0c1e57098)", usage=USAGE)


def with_variants(*names: str) -> EngineFacts:
    """An engine whose folder holds these CPU variants."""
    backends = tuple(f"libggml-cpu-{name}.so" for name in names)
    return parse_facts(version="version: 0.5.0-dev (build 11312, commit 0c1e57098)", usage=USAGE, backends=backends)


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


def machine(
    *,
    total_mib: int = 16384,
    limit_mib: int | None = None,
    logical: int = 8,
    physical: int = 4,
    quota: float | None = None,
) -> Hardware:
    return Hardware(
        cpu=Cpu(model_name="test", logical=logical, physical=physical, quota=quota, isa=("avx2",)),
        memory=Memory(
            total_mib=total_mib,
            available_mib=total_mib - 500,
            limit_mib=limit_mib,
            limit_used_mib=None if limit_mib is None else 50,
            memlock_limit_mib=8,
        ),
        numa=(),
        volume=Volume(path=Path("/data"), free_mib=1000, total_mib=2000, is_writable=True),
        gpus=GpuProbe(),
        gpu_requested=False,
    )
