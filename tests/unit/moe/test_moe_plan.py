"""What `plan --explain` says of an expert cache."""

from __future__ import annotations

import pytest

from appliance.engines.llama.planning.space import Space
from appliance.settings import resolve_settings
from tests.builders import facts, model
from tests.golden.machines import MACHINES


def said(machine: str, name: str, quantization: str) -> str | None:
    hardware = MACHINES[machine]
    image, engine = facts(has_cuda=bool(hardware.gpus.gpus))
    space = Space(resolve_settings({"alias": name}, {}), image, engine, hardware, model(name, quantization))
    return space.modelled(space.best)


def test_a_mixture_larger_than_the_gpu_is_modelled_beside_n_cpu_moe() -> None:
    words = said("laptop-5060", "qwen3-30b-a3b", "Q3_K_M") or ""
    assert words.startswith("modelled: ")
    for part in ("slots a layer", "% hits", "MB copied", "tok/s (", "--n-cpu-moe ", "one prompt of Qwen3-30B-A3B"):
        assert part in words
    assert "short and optimistic" in words


@pytest.mark.parametrize(
    ("machine", "name", "quantization"),
    [
        ("cpu-16g", "qwen3-30b-a3b", "Q2_K"),  # no GPU
        ("h200", "gpt-oss-120b", "MXFP4"),  # all on it
        ("4090-measured", "qwen3.6-35b-a3b", "Q6_K"),  # no trace of this family is shipped
        ("laptop-5060", "llama-3.1-8b", "Q5_K_M"),  # no mixture
    ],
)
def test_nothing_is_said_where_nothing_is_known(machine: str, name: str, quantization: str) -> None:
    assert said(machine, name, quantization) is None
