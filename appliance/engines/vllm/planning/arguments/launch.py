"""vLLM's part of a plan, and the compile key of a plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from appliance.plan import PREDICTED, KnobEffect, Launch, Plan, launch_as
from appliance.plan.parts.launch import Value
from appliance.values import dataclass

THINKING_FLAG = "--default-chat-template-kwargs"
EAGER = "EAGER"  # without torch.compile and CUDA graphs
GRAPH_MODES = ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY", "NONE", EAGER)


@dataclass(frozen=True, kw_only=True)
class VllmLaunch(Launch):
    """Launch parameters of vLLM. Sizes are in tokens unless the name says otherwise.

    The KV cache is given in bytes if an earlier start told its size or the GPUs are uneven, else as a share of the
    whole GPU (utilization).
    """

    dtype: str
    max_num_batched_tokens: int
    graph_mode: str
    graph_sizes: tuple[int, ...]
    block_size: int  # effective: vLLM raises it for hybrid models
    asked_block_size: int | None  # None: the engine's own choice
    tensor_parallel: int
    pipeline_parallel: int
    stage_layers: tuple[int, ...]  # number of layers of each pipeline stage; empty: one stage
    nodes: int = 1  # hosts, all with the same number of ranks
    kv_bytes: int | None
    utilization: float | None  # share of the GPU that must be free at the start; None on the CPU
    blocks: int  # predicted
    has_prefix_cache: bool = True
    names_kv_type: bool = False  # True if vLLM would otherwise use the checkpoint's own type
    attention_backend: str | None  # None: the engine's own choice
    gdn_backend: str | None  # kernels of linear attention; None: the engine's own choice, or the model has none
    hf_overrides: str | None  # JSON
    is_text_only: bool  # True for a multimodal model served without its vision and audio towers
    threads: int | None  # per rank of the CPU build; None: vLLM binds one to each core
    chat_template: str | None
    tool_parser: str | None = None  # None: the user passed one, or there is none
    reasoning_parser: str | None = None  # None: the user passed one, or there is none
    sees: bool = False  # True if the model reads images
    variables: tuple[tuple[str, str], ...]  # variables of the engine that the user set
    engine_args: tuple[str, ...]  # arguments passed on unchanged, on which the plan has no influence

    @property
    def knobs(self) -> tuple[tuple[str, Value], ...]:
        return (
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("graph_mode", self.graph_mode),
            ("block_size", self.block_size),
        )

    @property
    def reads(self) -> tuple[str, ...]:
        return ("image",) if self.sees else ()

    @property
    def calls_tools(self) -> bool:
        return self.tool_parser is not None or {"--enable-auto-tool-choice", "--tool-call-parser"} <= {
            *self.engine_args
        }

    @property
    def splits_reasoning(self) -> bool:
        return self.reasoning_parser is not None or "--reasoning-parser" in self.engine_args

    @property
    def local_ranks(self) -> int:
        """Number of ranks on each host."""
        return self.tensor_parallel * self.pipeline_parallel // self.nodes

    @property
    def tie_break(self) -> int:
        """1 for vLLM's default graph mode, which is the most widely used one and so wins between equals, and for the
        mode that compiles nothing; else 0. GPUs are offered the former, CPUs the latter."""
        return int(self.graph_mode in ("FULL_AND_PIECEWISE", EAGER))


# Priors of one step of a knob. The values are chosen, since no start on a GPU was measured yet. Graphs save the launch
# time of every token, so their prior is large. A larger batch only saves partly filled batches, so its prior is small.
KNOB_EFFECTS: Mapping[str, KnobEffect] = {
    "max_num_batched_tokens": KnobEffect(prior=0.1, phases=("prefill",), is_of_doubling=True),
    "graph_mode": KnobEffect(prior=0.3, phases=("decode",)),
    "block_size": KnobEffect(prior=0.05, is_of_doubling=True),
    "kv_type": KnobEffect(prior=0.2),
    "split": KnobEffect(prior=0.3),
    "placement": PREDICTED,
}


def launch_of(plan: Plan) -> VllmLaunch:
    """Return vLLM's part of the plan. Raises TypeError for a plan of another engine."""
    return launch_as(plan, VllmLaunch)


def compile_key(plan: Plan) -> str:
    """Return a short hash of everything that torch.compile's cache depends on.

    Two plans with the same key share the cache; another key costs a cold compilation of 24 to 166 s. The parts were
    found on vLLM 0.32 with `VllmConfig.compute_hash`: context, sequences, tokens of a step, type and block of the KV
    cache, speculative decoding. Utilization, bytes of the cache, prefix caching, seed and name have no effect. The
    effect of the user's own arguments is unknown, so they are included.
    """
    return hashlib.sha256(json.dumps(compile_parts(plan), sort_keys=True).encode()).hexdigest()[:10]


def compile_parts(plan: Plan) -> dict[str, object]:
    """Return the parts of the compile key by name."""
    launch = launch_of(plan)
    compiled = list(launch.engine_args)
    if compiled[:1] == [THINKING_FLAG]:
        del compiled[:2]  # what a template is given compiles nothing
    speculation = (plan.speculation.kind, plan.speculation.tokens) if plan.speculation else None
    return {
        "model": plan.model_path,
        "context": plan.context,
        "kv_type": plan.kv_type,
        "seqs": plan.parallel,
        "tokens": launch.max_num_batched_tokens,
        "dtype": launch.dtype,
        "graphs": [launch.graph_mode, *launch.graph_sizes],
        "block": launch.block_size,
        "ranks": [launch.tensor_parallel, launch.pipeline_parallel, *launch.stage_layers],
        "attention": [launch.attention_backend, launch.gdn_backend],
        "overrides": launch.hf_overrides,
        "text_only": launch.is_text_only,
        "speculation": speculation,
        **({"engine_args": compiled} if compiled else {}),
        **({"variables": own} if (own := [each for each in launch.variables if each[0].startswith("VLLM_")]) else {}),
    }
