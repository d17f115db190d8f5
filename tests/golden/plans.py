"""Plans of chosen machines and models as text, one file each, to be read by people and compared by a test.

python -m tests.golden.plans    writes tests/golden/plans/*.txt anew: read the difference before keeping it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.server import arguments, environment
from appliance.errors import FatalError
from appliance.plan import explain
from appliance.settings import resolve_settings
from tests.builders import facts_for, model
from tests.golden.files import wrapped, write_anew
from tests.golden.machines import MACHINES

HERE = Path(__file__).parent / "plans"


@dataclass(frozen=True, kw_only=True)
class Case:
    machine: str
    model: str
    quantization: str
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        asked = "".join(f"_{name}-{value}" for name, value in self.flags.items())
        return f"{self.machine}_{self.model}_{self.quantization}{asked}"


CASES = (
    Case(machine="cpu-16g", model="llama-3.1-8b", quantization="Q4_K_M"),
    Case(machine="cpu-16g", model="qwen3-30b-a3b", quantization="Q2_K"),
    Case(machine="cpu-limit-8g", model="qwen3-8b", quantization="Q4_K_M"),
    Case(machine="laptop-5060", model="qwen3-30b-a3b", quantization="Q3_K_M"),
    Case(machine="laptop-5060", model="llama-3.1-8b", quantization="Q5_K_M"),
    Case(
        machine="laptop-5060",
        model="llama-3.1-8b",
        quantization="Q5_K_M",
        flags={"ctx_size": "65536", "kv_type": "f16"},
    ),
    Case(machine="t4", model="gemma-3-12b", quantization="Q4_K_M"),
    Case(machine="4070+3060", model="qwen3.6-27b", quantization="Q4_K_M"),
    Case(machine="4090-shared", model="qwen3-8b", quantization="Q8_0"),
    Case(machine="2x2080ti-22g", model="qwen3.6-27b", quantization="Q4_K_M"),
    Case(machine="2x2080ti-22g", model="llama-3.1-8b", quantization="F16"),
    Case(machine="4x2080ti-22g", model="gpt-oss-120b", quantization="MXFP4"),
    Case(machine="2x4090", model="qwen3.6-35b-a3b", quantization="Q4_K_M"),
    Case(machine="2x4090", model="gpt-oss-120b", quantization="MXFP4"),
    Case(machine="2-socket", model="gpt-oss-120b", quantization="MXFP4"),
    Case(machine="3090+4090+5060", model="llama-3.1-8b", quantization="Q8_0"),
    Case(machine="3090+4090+5060", model="gpt-oss-120b", quantization="MXFP4"),
    Case(machine="24+8", model="qwen3.6-27b", quantization="Q5_K_M"),
    Case(machine="a100-mig", model="qwen3-30b-a3b", quantization="Q4_K_M"),
    Case(machine="h200", model="gpt-oss-120b", quantization="MXFP4"),
    Case(machine="h200", model="deepseek-v3", quantization="Q2_K"),
    Case(machine="gb10", model="gpt-oss-120b", quantization="MXFP4"),
    Case(machine="4090-measured", model="qwen3.6-35b-a3b", quantization="Q6_K"),
    Case(machine="2x4090", model="deepseek-v3", quantization="Q2_K"),
    Case(machine="4090", model="qwen3-30b-a3b-2507", quantization="Q4_K_M"),
    Case(machine="h100", model="llama-3.3-70b", quantization="Q4_K_M"),
)


def space(case: Case) -> Space:
    hardware = MACHINES[case.machine]
    image, engine = facts_for(hardware)
    settings = resolve_settings({"alias": case.model, **case.flags}, {})
    return Space(settings, image, engine, hardware, model(case.model, case.quantization))


def text(case: Case) -> str:
    _, engine = facts_for(MACHINES[case.machine])
    asked = "".join(f", {name} {value}" for name, value in case.flags.items())
    head = f"{case.model} at {case.quantization} on {case.machine}{asked}"
    try:
        first = space(case).best
    except FatalError as error:
        return f"{head}\n\n{wrapped(f'error {error.exit_code}: {error.message}')}\n{wrapped(f'hint: {error.hint}')}\n"
    argv = " ".join(arguments(first, engine, Path("/tmp/engine.sock")))
    variables = environment(first, Path("/opt/llama"), Path("/data/cache/golden"))
    cuda = "".join(f"{name}={value} " for name, value in variables.items() if name.startswith(("CUDA", "GGML")))
    lines = [wrapped(line, indent="    ") for line in explain(first, is_verbose=True).splitlines()]
    return "\n".join(
        (
            head,
            "",
            *lines,
            "",
            wrapped(f"{cuda}llama-server {argv}", indent="    "),
            "",
        )
    )


def main() -> None:
    write_anew(HERE, {case.name: text(case) for case in CASES})


if __name__ == "__main__":
    main()
