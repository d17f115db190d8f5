"""Command line and environment of vLLM's server, from a plan. All its flags and variables are written here only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from appliance.command import Command, Readiness
from appliance.engines.engine import Install, Node
from appliance.engines.vllm.planning.arguments.launch import EAGER, launch_of
from appliance.engines.vllm.planning.arguments.variables import NETWORK
from appliance.engines.vllm.planning.model.precision import ENGINE_TYPES
from appliance.engines.vllm.process.facts import BINARY
from appliance.errors import EngineArgumentsError
from appliance.image_facts import EngineFacts
from appliance.plan import GpuAllocation, Plan

DRAIN_S = 0  # no waiting in vLLM: the gateway ends streams before SIGTERM, and a vLLM that waits was seen to hang
QUEUED_AT_LEAST = 64  # larger than the gateway's own limit, so only a safety net; vLLM answers 503 beyond it
# Values for n-grams from vLLM's own example, docs/features/spec_decode.md.
_NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


class _Flags:
    """Argument list in the making. A flag that this engine lacks is refused here; vLLM itself takes eleven seconds to
    refuse it."""

    def __init__(self, facts: EngineFacts) -> None:
        self._known = frozenset(facts.flags)
        self._version = facts.version
        self.argv: list[str] = []

    def need(self, flag: str, *values: str | int | float) -> None:
        """Add a flag. Raises EngineArgumentsError (40) if the engine facts do not list it."""
        if self._known and flag not in self._known:
            message = f"engine has no flag {flag}: {BINARY} {self._version}, by the engine facts of this image"
            raise EngineArgumentsError(
                message, hint="the appliance does not match this image's engine; rebuild the image"
            )
        self.argv += [flag, *map(str, values)]

    def switch(self, name: str, *, is_on: bool) -> None:
        """Add a flag that turns `name` on or off. Off is `--disable-x` since 0.33, `--no-enable-x` before."""
        off = f"--disable-{name}" if f"--disable-{name}" in self._known else f"--no-enable-{name}"
        self.need(f"--enable-{name}" if is_on else off)

    def use(self, flag: str, *values: str | int | float) -> None:
        """Add an optional flag: it is left out if the engine facts do not list it or are empty."""
        if flag in self._known:
            self.need(flag, *values)


def arguments(plan: Plan, facts: EngineFacts, socket_path: Path, node: Node | None = None) -> tuple[str, ...]:
    """Return the whole argument list. Everything that a plan decides is explicit: plain integers, JSON with sorted
    keys.

    A follower gets the leader's list with its own rank and with `--headless`, which opens no socket.
    """
    flags, launch = _Flags(facts), launch_of(plan)
    flags.need("--uds", str(socket_path))
    flags.need("--served-model-name", plan.alias)
    flags.need("--dtype", launch.dtype)
    flags.need("--max-model-len", plan.context)
    flags.need("--max-num-seqs", plan.parallel)
    flags.need("--max-num-batched-tokens", launch.max_num_batched_tokens)
    if launch.kv_bytes is not None:
        flags.need("--kv-cache-memory-bytes", launch.kv_bytes)
    if launch.utilization is not None:
        flags.need("--gpu-memory-utilization", launch.utilization)
    _add_kv(flags, plan)
    _add_kernels(flags, plan)
    _add_layout(flags, plan)
    if node is not None:
        _add_node(flags, node)
    if plan.speculation is not None:
        flags.need("--speculative-config", speculative_config(plan))
    if launch.hf_overrides is not None:
        flags.need("--hf-overrides", launch.hf_overrides)
    if launch.is_text_only:
        flags.need("--language-model-only")
    if launch.chat_template is not None:
        flags.need("--chat-template", launch.chat_template)
    if launch.tool_parser is not None:
        flags.need("--enable-auto-tool-choice")
        flags.need("--tool-call-parser", launch.tool_parser)
    if launch.reasoning_parser is not None:
        flags.need("--reasoning-parser", launch.reasoning_parser)
    _add_serving(flags, plan.parallel)
    return ("serve", plan.model_path, *flags.argv, *launch.engine_args)


def _add_kv(flags: _Flags, plan: Plan) -> None:
    launch = launch_of(plan)
    kv_type = ENGINE_TYPES.get(plan.kv_type, plan.kv_type)
    if kv_type != launch.dtype or launch.names_kv_type:  # else vLLM's default "auto" means the same type
        flags.need("--kv-cache-dtype", kv_type)
    if launch.asked_block_size is not None:
        flags.need("--block-size", launch.asked_block_size)
    if not plan.is_embedding:
        flags.switch("prefix-caching", is_on=launch.has_prefix_cache)


def _add_kernels(flags: _Flags, plan: Plan) -> None:
    launch = launch_of(plan)
    if launch.attention_backend is not None and plan.placement.shares:
        flags.need("--attention-backend", launch.attention_backend)
    if launch.gdn_backend is not None:
        flags.need("--gdn-prefill-backend", launch.gdn_backend)
    if launch.graph_mode == EAGER:
        flags.need("--enforce-eager")
    elif plan.placement.shares:
        flags.need("--compilation-config", compilation_config(plan))


def _add_layout(flags: _Flags, plan: Plan) -> None:
    launch = launch_of(plan)
    if launch.tensor_parallel > 1:
        flags.need("--tensor-parallel-size", launch.tensor_parallel)
    if launch.pipeline_parallel > 1:
        flags.need("--pipeline-parallel-size", launch.pipeline_parallel)


def _add_node(flags: _Flags, node: Node) -> None:
    """Add vLLM's native flags for several hosts, which need no Ray."""
    flags.need("--nnodes", node.nodes)
    flags.need("--node-rank", node.rank)
    flags.need("--master-addr", node.leader)
    flags.need("--master-port", node.port)
    if node.rank:
        flags.need("--headless")


def _add_serving(flags: _Flags, seqs: int) -> None:
    # Without this, sampling defaults from the model's folder would apply to clients' requests and change the compile
    # key.
    flags.need("--generation-config", "vllm")
    flags.need("--shutdown-timeout", DRAIN_S)
    flags.use("--max-num-queued-reqs", max(QUEUED_AT_LEAST, 16 * seqs))
    flags.need("--disable-uvicorn-access-log")
    flags.need("--disable-fastapi-docs")
    # Number of cached prompt tokens and the engine's own times: the measurements are made from them.
    flags.use("--enable-prompt-tokens-details")
    flags.use("--enable-per-request-metrics")


def compilation_config(plan: Plan) -> str:
    """Return JSON with the mode of CUDA graphs and the batch sizes that they are captured for."""
    launch = launch_of(plan)
    config: dict[str, object] = {"cudagraph_mode": launch.graph_mode}
    if launch.graph_sizes:
        config["cudagraph_capture_sizes"] = list(launch.graph_sizes)
    return _json(config)


def speculative_config(plan: Plan) -> str:
    """Return JSON for `--speculative-config`. Raises ValueError if the plan has no speculative decoding."""
    speculation = plan.speculation
    if speculation is None:
        message = "the plan does not speculate"
        raise ValueError(message)
    config: dict[str, object] = {"method": speculation.kind, "num_speculative_tokens": speculation.tokens}
    return _json(config | _NGRAM if speculation.kind == "ngram" else config)


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def command(
    plan: Plan, install: Install, socket_path: Path, *, is_ready: Readiness, is_error: Callable[[str], bool]
) -> Command:
    """Return what the supervisor starts. The child gets a small environment of its own and inherits no variable."""
    return Command(
        argv=(str(install.engine_dir / "bin" / BINARY), *arguments(plan, install.facts, socket_path, install.node)),
        environment=environment(plan, install, scratch_of(socket_path)),
        is_ready=is_ready,
        is_error=is_error,
        socket_path=socket_path,
        stall_timeout_s=install.stall_timeout_s,
        oom_kills=install.oom_kills,
    )


def scratch_of(socket_path: Path) -> Path:
    """Return the folder for sockets between vLLM's processes. It is next to the API socket, since paths must be
    short."""
    return socket_path.with_suffix(".ipc")


def environment(plan: Plan, install: Install, scratch: Path) -> dict[str, str]:
    """Return the variables of the engine. The user's own VLLM variables in the plan come last and override."""
    launch, cache = launch_of(plan), install.cache_dir
    found = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(cache / "home"),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "XDG_CACHE_HOME": str(cache / "xdg"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),  # the default is below /tmp, which may be mounted noexec
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "HF_HOME": str(cache / "huggingface"),
        "DG_JIT_CACHE_DIR": str(cache / "deep_gemm"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_RPC_BASE_PATH": str(scratch),
        "VLLM_HOST_IP": install.node.address if install.node else "127.0.0.1",
    }
    placed = _gpu_variables(plan, install) if plan.placement.shares else _cpu_variables(plan)
    stages = ",".join(map(str, launch.stage_layers))
    return {**found, **placed, **({"VLLM_PP_LAYER_PARTITION": stages} if stages else {}), **_network(install),
            **dict(launch.variables)}  # fmt: skip


def _network(install: Install) -> dict[str, str]:
    """Return the variables that choose network interfaces between hosts, as the user set them on each host."""
    given = install.node.environment if install.node else {}
    return {name: value for name, value in given.items() if name.startswith(NETWORK)}


def own_shares(plan: Plan, install: Install) -> tuple[GpuAllocation, ...]:
    """Return the GPU shares of the ranks on this host."""
    ranks = launch_of(plan).local_ranks
    first = install.node.rank * ranks if install.node else 0
    return plan.placement.shares[first : first + ranks]


def _gpu_variables(plan: Plan, install: Install) -> dict[str, str]:
    """Return variables for GPUs: UUIDs in the order of ranks, so that the engine's cuda:0 is the plan's first GPU."""
    found = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(share.gpu.id for share in own_shares(plan, install)),
        "CUDA_CACHE_PATH": str(install.cache_dir / "cuda"),
    }
    if install.driver_dir is not None:
        found["LD_LIBRARY_PATH"] = str(install.driver_dir)
    return found


# By default libgomp spins 300,000 rounds at a barrier before it sleeps. If other work needs the CPUs, a thread then
# wastes whole time slices: 109 decode steps/s on a quiet machine, 1.5 at a load of 12 (torch 2.13, two cores;
# docs/figures.md). With 1,000 rounds: 103 and 27. With 100 rounds: 69 and 48.
_SPIN_ROUNDS = 1000


def _cpu_variables(plan: Plan) -> dict[str, str]:
    """Return variables for the CPU build. If the plan sets no number of threads, vLLM binds one thread to each core."""
    threads = launch_of(plan).threads
    found = {"GOMP_SPINCOUNT": str(_SPIN_ROUNDS)}
    if threads is not None:
        found |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return found
