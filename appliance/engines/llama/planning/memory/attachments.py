"""Memory of LoRA adapters and of the projector. Adapters lie with the matrices that they change, the projector on the
first GPU or in host memory. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.llama.planning.memory.memory import MIB
from appliance.model import Model, Projector

# GPU memory while a projector reads an image: the buffer of its graph, and growth for images larger than expected.
WORK_LEAST_MIB, WORK_MOST_MIB = 512.0, 1024.0


def with_adapters(model: Model) -> Model:
    """Return the model with its adapters' bytes in the layers: each token reads both (llama-graph.cpp,
    build_lora_mm)."""
    if not model.adapters:
        return model
    of_layers: dict[int, int] = {}
    for adapter in model.adapters:
        for layer, size in adapter.layer_bytes:
            of_layers[layer] = of_layers.get(layer, 0) + size
    stack = tuple(
        replace(layer, dense_bytes=layer.dense_bytes + of_layers.get(at, 0)) for at, layer in enumerate(model.stack)
    )
    return replace(
        model,
        stack=stack,
        weights_bytes=model.weights_bytes + sum(adapter.weights_bytes for adapter in model.adapters),
        output_bytes=model.output_bytes + sum(adapter.other_bytes for adapter in model.adapters),
    )


def adapters_mib(model: Model) -> float:
    return sum(adapter.weights_bytes for adapter in model.adapters) / MIB


def projector_mib(projector: Projector | None, *, on_gpu: bool) -> float:
    """Return the MiB of a projector's weights and work buffer; 0 without a projector."""
    if projector is None:
        return 0.0
    work = min(WORK_MOST_MIB, projector.work_mib)
    return projector.weights_mib + (max(WORK_LEAST_MIB, work) if on_gpu else work)
