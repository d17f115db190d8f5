"""A model as the gateway lists it, and a backend that has nothing but that."""

from __future__ import annotations

from pathlib import Path

from appliance.console.progress import Phase, Progress
from appliance.engine_route import EngineRoute
from appliance.gateway.engine.backend import Backend, ListedModel

CONTEXT, NATIVE = 32768, 131072
QWEN = ListedModel(
    id="Qwen3-8B-Q4_K_M",
    phase=Phase.READY,
    aliases=("qwen", "qwen:8b-q4_k_m"),
    created_s=1_790_000_000,
    context=CONTEXT,
    native_context=NATIVE,
    input_modalities=("text", "image"),
    calls_tools=True,
    reasons=True,
    format="gguf",
    architecture="qwen3",
    quantization="Q4_K_M",
    size_bytes=5_027_783_488,
    parameters=8_190_735_360,
    vocabulary=151936,
    embedding_length=4096,
)


def backend(listed: ListedModel, routes: tuple[EngineRoute, ...] = ()) -> Backend:
    return Backend(
        name=listed.id,
        socket_path=Path("/nonexistent/e.sock"),
        routes=routes,
        progress=lambda: Progress(phase=listed.phase),
        documents={},
        listed=lambda: listed,
    )
