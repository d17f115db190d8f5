"""llama-bench: what needs no reload (threads, ubatch, depth), measured in one process. Pure.

It runs the Cartesian product of its lists, ubatch outermost, then threads, then depth; at each depth it reads a prompt
and then decodes, each in a context of its own. Lists of K and of V types would be paired in every way, also in those
that no plan has: so a process has one KV type. It feeds random token ids; `unsuitable` says where that is no measure.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.command import Command
from appliance.engines.llama.server import command_of_job, placement_arguments
from appliance.errors import EngineNotReadyError
from appliance.image_facts import EngineFacts
from appliance.plan import Plan

BINARY = "llama-bench"
KV_TYPES = ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")  # llama-server also has f32
_OTHER_NAMES = {"--gpu-layers": "--n-gpu-layers"}
_ROW_BEGINS = '{"build_commit":'
_LOADED = ": warmup "  # `llama-bench: benchmark 1/8: warmup prompt run` is the first thing after the load


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one process varies. The type is that of K and of V."""

    threads: int
    ubatch: int
    kv_type: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every pair of the two lists is a cell, all of one KV type."""

    threads: tuple[int, ...]
    ubatches: tuple[int, ...]
    kv_type: str

    @property
    def cells(self) -> tuple[Cell, ...]:
        """In the order in which the program runs them."""
        pairs = itertools.product(self.ubatches, self.threads)
        return tuple(Cell(threads=threads, ubatch=ubatch, kv_type=self.kv_type) for ubatch, threads in pairs)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Tokens are decoded at depth 0 and after each of the stretches, so the prompt of one stretch that is read at a
    depth is what had to be read for the next. At the last depth the program reads one too, which serves nothing."""

    stretch: int = 512  # tokens
    stretches: int = 1
    decode_tokens: int = 24

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(self.stretch * number for number in range(self.stretches + 1))

    @property
    def window(self) -> int:
        """Of the largest context that is made."""
        return self.depths[-1] + max(self.stretch, self.decode_tokens)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is the same for all rows of a process, in the program's own words."""

    batch: int
    flash_attention: int  # 1 on, 0 off, -1 auto
    load_mode: str
    devices: str = "auto"
    gpu_layers: int = -1
    cpu_expert_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """With `depth` tokens in the cache a prompt is read, or tokens are decoded."""

    threads: int
    ubatch: int
    k_type: str
    v_type: str
    depth: int
    read_tokens: int
    decode_tokens: int
    setup: Setup

    def in_words(self) -> str:
        """As in "2 threads, ubatch 512, KV f16: reading 512 tokens at depth 0"."""
        work = f"reading {self.read_tokens:,}" if self.read_tokens else f"decoding {self.decode_tokens:,}"
        kv_type = self.k_type if self.k_type == self.v_type else f"{self.k_type} and {self.v_type}"
        return f"{self.threads} threads, ubatch {self.ubatch}, KV {kv_type}: {work} tokens at depth {self.depth:,}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task and how long it took, all of its tokens together."""

    task: Task
    ms: float


def unsuitable(plan: Plan, steps: Steps, *, has_experts: bool) -> str | None:
    """Why this program would not measure what the server does with the plan; None where it does."""
    if steps.window > plan.context:
        return f"llama-bench would need a window of {steps.window:,} tokens for it, and the plan's has {plan.context:,}"
    if plan.is_embedding:
        return "the model gives vectors: there is nothing to decode"
    if has_experts:
        return "llama-bench feeds random token ids, and those are routed to other experts than text is"
    if plan.threads_batch != plan.threads:
        return f"llama-bench has one number of threads, and the plan two: {plan.threads} and {plan.threads_batch}"
    if plan.kv_type not in KV_TYPES:
        return f"llama-bench does not know this KV type: {plan.kv_type}"
    if "," in plan.model_path:
        return f"llama-bench takes a comma for the end of a path: {plan.model_path}"
    return None


def arguments(plan: Plan, grid: Grid, steps: Steps, facts: EngineFacts) -> tuple[str, ...]:
    """As the server has it, but for what the grid and the steps vary; its window is as large as each task needs."""
    setup = _setup(plan, grid, facts)
    values: tuple[tuple[str, str | int], ...] = (
        ("--model", plan.model_path),
        ("--output", "jsonl"),
        ("--repetitions", 1),
        ("--n-prompt", steps.stretch),
        ("--n-gen", steps.decode_tokens),
        ("--n-depth", _listed(steps.depths)),
        ("--threads", _listed(grid.threads)),
        ("--ubatch-size", _listed(grid.ubatches)),
        ("--batch-size", setup.batch),
        ("--cache-type-k", grid.kv_type),
        ("--cache-type-v", grid.kv_type),
        ("--flash-attn", "on" if plan.flash_attention else "off"),
        ("--load-mode", setup.load_mode),
    )
    words = [str(word) for pair in values for word in pair]
    # Without the one it keeps to itself why a load failed, the other says when the load is over.
    return (*words, *(word for pair in _placement(plan, facts) for word in pair), "--verbose", "--progress")


def tasks(plan: Plan, grid: Grid, steps: Steps, facts: EngineFacts) -> tuple[Task, ...]:
    """What it will run, in this order. A row of anything else is no figure of this plan."""
    setup = _setup(plan, grid, facts)
    work = ((steps.stretch, 0), (0, steps.decode_tokens))
    return tuple(
        Task(
            threads=cell.threads,
            ubatch=cell.ubatch,
            k_type=cell.kv_type,
            v_type=cell.kv_type,
            depth=depth,
            read_tokens=read,
            decode_tokens=made,
            setup=setup,
        )
        for cell, depth, (read, made) in itertools.product(grid.cells, steps.depths, work)
    )


def parse_row(line: str) -> Row | None:
    """None for a line of its log. Raises EngineNotReadyError for a row that cannot be read, or has no time."""
    begin = line.find(_ROW_BEGINS)  # it may stand behind dots of progress
    if begin < 0:
        return None
    try:
        said: dict[str, Any] = json.loads(line[begin:])
        samples = [float(ns) for ns in said["samples_ns"]]
        task = Task(
            threads=int(said["n_threads"]),
            ubatch=int(said["n_ubatch"]),
            k_type=str(said["type_k"]),
            v_type=str(said["type_v"]),
            depth=int(said["n_depth"]),
            read_tokens=int(said["n_prompt"]),
            decode_tokens=int(said["n_gen"]),
            setup=Setup(
                batch=int(said["n_batch"]),
                flash_attention=int(said["flash_attn"]),
                load_mode=str(said["load_mode"]),
                devices=str(said["devices"]),
                gpu_layers=int(said["n_gpu_layers"]),
                cpu_expert_layers=int(said["n_cpu_moe"]),
            ),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        message = f"{BINARY} printed a row that cannot be read: {type(error).__name__}: {error}: {line[begin:][:200]}"
        raise EngineNotReadyError(message) from error
    if not samples or not all(0 < ns < math.inf for ns in samples):
        message = f"{BINARY} gave no time for {task.in_words()}: {said['samples_ns']}"
        raise EngineNotReadyError(message)
    return Row(task=task, ms=sum(samples) / len(samples) / 1e6)


def is_loaded(line: str) -> bool:
    """Whether this line of the log says that the first task begins."""
    return line.startswith(f"{BINARY}: benchmark ") and _LOADED in line


def command(
    plan: Plan,
    facts: EngineFacts,
    grid: Grid,
    steps: Steps,
    *,
    engine_dir: Path,
    cache_dir: Path,
    stall_timeout_s: float,
    driver_dir: Path | None = None,
    oom_kills: Callable[[], int | None] | None = None,
) -> Command:
    """Ready for a supervisor."""
    argv = (str(engine_dir / BINARY), *arguments(plan, grid, steps, facts))
    return command_of_job(
        argv,
        plan,
        cache_dir=cache_dir,
        stall_timeout_s=stall_timeout_s,
        driver_dir=driver_dir,
        oom_kills=oom_kills,
    )


def _setup(plan: Plan, grid: Grid, facts: EngineFacts) -> Setup:
    placed = dict(_placement(plan, facts))
    return Setup(
        batch=max(plan.batch, *grid.ubatches),  # a smaller one would cut the ubatch
        flash_attention=1 if plan.flash_attention else 0,
        load_mode=plan.load_mode,
        devices=placed.get("--device", "auto"),
        gpu_layers=int(placed.get("--n-gpu-layers", -1)),
        cpu_expert_layers=int(placed.get("--n-cpu-moe", 0)),
    )


def _placement(plan: Plan, facts: EngineFacts) -> tuple[tuple[str, str], ...]:
    """The server's, respelled: here a comma parts alternatives, and a slash the devices of one."""
    words = placement_arguments(plan, facts)
    pairs = zip(words[::2], words[1::2], strict=True)
    return tuple((_OTHER_NAMES.get(flag, flag), value.replace(",", "/")) for flag, value in pairs)


def _listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
