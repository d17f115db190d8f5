"""What vLLM is started with beside what every plan has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from appliance.plan import PREDICTED, KnobEffect, Launch, Plan, launch_as
from appliance.plan.parts.launch import Value
from appliance.values import dataclass

EAGER = "EAGER"  # neither compiled nor captured
GRAPH_MODES = ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY", "NONE", EAGER)


@dataclass(frozen=True, kw_only=True)
class VllmLaunch(Launch):
    """Sizes in tokens unless the name says otherwise. The cache is given in bytes where an earlier start told them or
    the cards are uneven, else by the share of the whole card."""

    dtype: str
    max_num_batched_tokens: int
    graph_mode: str
    graph_sizes: tuple[int, ...]
    block_size: int  # that the engine ends with: hybrids raise it
    asked_block_size: int | None  # None: the engine's own choice
    tensor_parallel: int
    pipeline_parallel: int
    stage_layers: tuple[int, ...]  # of each pipeline stage; empty: one
    nodes: int = 1  # hosts, each with as many ranks
    kv_bytes: int | None
    utilization: float | None  # that has to be free when the engine looks; None on the CPU
    blocks: int  # predicted
    has_prefix_cache: bool = True
    names_kv_type: bool = False  # else the engine would take that of the checkpoint
    attention_backend: str | None  # None: the engine's own choice
    gdn_backend: str | None  # of linear attention; None: the engine's own choice, or the model has none
    hf_overrides: str | None  # JSON
    is_text_only: bool  # a multimodal model without its towers
    threads: int | None  # of the CPU build; None: one on each core, bound
    chat_template: str | None
    tool_parser: str | None = None  # for what the model writes; None: the user's own, or none
    reasoning_parser: str | None = None
    sees: bool = False  # a multimodal model with its towers
    variables: tuple[tuple[str, str], ...]  # of the engine, that the user set
    engine_args: tuple[str, ...]  # that nothing here decides

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
        """Of one host."""
        return self.tensor_parallel * self.pipeline_parallel // self.nodes

    @property
    def tie_break(self) -> int:
        """The engine's own mode of graphs is the one that most people run."""
        return int(self.graph_mode == "FULL_AND_PIECEWISE")


# Priors of a step: chosen, until starts on GPUs were measured. Graphs are what a token's launches cost, a larger batch
# of a prompt saves only its tails.
KNOB_EFFECTS: Mapping[str, KnobEffect] = {
    "max_num_batched_tokens": KnobEffect(prior=0.1, phases=("prefill",), is_of_doubling=True),
    "graph_mode": KnobEffect(prior=0.3, phases=("decode",)),
    "block_size": KnobEffect(prior=0.05, is_of_doubling=True),
    "kv_type": KnobEffect(prior=0.2),
    "split": KnobEffect(prior=0.3),
    "placement": PREDICTED,
}


def launch_of(plan: Plan) -> VllmLaunch:
    """Raises TypeError for a plan of another engine."""
    return launch_as(plan, VllmLaunch)


def compile_key(plan: Plan) -> str:
    """Short hash of all that makes torch.compile begin anew: two plans with the same share a cache, others cost a
    cold compilation of 24 to 166 s.

    What moves it was seen on vLLM 0.32 with `VllmConfig.compute_hash`: context, sequences, tokens of a step, type and
    block of the cache, speculative decoding. Not utilization, bytes of the cache, prefix caching, seed or name. Of what
    the user passes through nobody knows; it counts as if it did.
    """
    return hashlib.sha256(json.dumps(compile_parts(plan), sort_keys=True).encode()).hexdigest()[:10]


def compile_parts(plan: Plan) -> dict[str, object]:
    """What the key is made of, by name."""
    launch = launch_of(plan)
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
        **({"engine_args": list(launch.engine_args)} if launch.engine_args else {}),
        **({"variables": own} if (own := [each for each in launch.variables if each[0].startswith("VLLM_")]) else {}),
    }
