"""llama-server: its command for a plan, and the meaning of its log lines. All its flags are set here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from appliance.command import Command, Readiness
from appliance.engines.engine import Install
from appliance.engines.gpu_work import gpu_work_of
from appliance.engines.llama.api.routes import SLOTS_PATH, parse_work
from appliance.engines.llama.planning.arguments.launch import NUMA_MODES, launch_of
from appliance.engines.llama.planning.arguments.numa import BATCH_MASK_FLAG, FLAG, MASK_FLAG, cpu_mask
from appliance.engines.llama.planning.arguments.passthrough_options import Extras
from appliance.engines.llama.process.experts import rates_path, rates_upkeep
from appliance.engines.llama.process.facts import BINARY
from appliance.engines.llama.process.log import is_error
from appliance.errors import EngineArgumentsError
from appliance.image_facts import EngineFacts
from appliance.plan import Allocated, Plan, k_and_v
from appliance.system.lack import is_lack

_SPECULATION = {"draft": "draft-simple", "mtp": "draft-mtp", "ngram": "ngram-mod"}
# `parse_allocated` needs the buffer sizes. Libraries log them at "info", which the engine prints at level 4, not at its
# default 3. The level cannot be lowered later. At 4 a request costs some twenty lines, without its text; they are kept
# for a crash and not repeated.
LOG_LEVEL = 4
# The share of a request that a slot has to hold before the request takes it. Price: a turn longer than the whole
# conversation before it does not find its slot, and that conversation, less than half of its tokens, is read again.
KEPT_SIMILARITY = "0.5"


class _Flags:
    """Argument list of flags that this binary has. A needed flag that it lacks is an error before anything starts."""

    def __init__(self, facts: EngineFacts) -> None:
        self._known = frozenset(facts.flags)
        self._build = f"build {facts.build}"
        self.argv: list[str] = []

    def need(self, flag: str, value: str | int | None = None) -> None:
        if flag not in self._known:
            message = f"engine has no flag {flag}: {BINARY} {self._build}, by the engine facts of this image"
            raise EngineArgumentsError(
                message, hint="this image's engine and appliance do not belong together; rebuild it"
            )
        self.argv += [flag] if value is None else [flag, str(value)]

    def use(self, flag: str, value: str | int | None = None) -> None:
        """Add an optional flag; it is left out if the binary lacks it."""
        if flag in self._known:
            self.need(flag, value)


def arguments(plan: Plan, facts: EngineFacts, socket_path: Path) -> tuple[str, ...]:
    """Return the engine's whole argument list. Everything that a plan decides is set explicitly."""
    flags, launch = _Flags(facts), launch_of(plan)
    flags.need("--model", plan.model_path)
    flags.need("--alias", plan.alias)
    flags.need("--host", str(socket_path))
    flags.need("--fit", "off")  # the engine's own fit ignores cgroup limits, and costs 0.17 s a start
    flags.need("--ctx-size", plan.context)
    flags.need("--cache-type-k", k_and_v(plan.kv_type)[0])
    flags.need("--cache-type-v", k_and_v(plan.kv_type)[1])
    flags.need("--flash-attn", "on" if launch.flash_attention else "off")
    flags.need("--threads", launch.threads)
    flags.need("--threads-batch", launch.threads_batch)
    flags.need("--batch-size", launch.batch)
    flags.need("--ubatch-size", launch.ubatch)
    flags.need("--parallel", plan.parallel)
    flags.use("--kv-unified")  # one context shared by all slots; without it each gets a fixed share
    flags.need("--cache-ram", launch.cache_ram_mib)
    if plan.parallel == 1:
        # Without this, another request takes the slot unsaved if it shares at least half of the conversation.
        flags.use("--slot-prompt-similarity", 0)
    elif launch.idle_slots_stay:
        flags.use("--no-cache-idle-slots")
        # A side request with the conversation's system prompt would take its slot at the default of 0.1.
        flags.use("--slot-prompt-similarity", KEPT_SIMILARITY)
    if launch.checkpoints is not None:
        flags.use("--ctx-checkpoints", launch.checkpoints)
    if launch.numa in NUMA_MODES:
        flags.need(FLAG, launch.numa)
    if launch.cpus:
        flags.need(MASK_FLAG, cpu_mask(launch.cpus))
        flags.use(BATCH_MASK_FLAG, cpu_mask(launch.cpus))
    flags.argv += metadata_arguments(plan, facts)
    flags.argv += placement_arguments(plan, facts)
    flags.argv += speculation_arguments(plan, facts)
    flags.use("--load-mode", launch.load_mode)
    flags.argv += pooling_arguments(plan, facts)
    flags.argv += beside_arguments(plan, facts)
    flags.argv += extra_arguments(launch.extras, facts)
    flags.use("--offline")
    flags.use("--no-ui")
    flags.use("--log-prefix")
    flags.use("--log-colors", "off")
    flags.need("--log-verbosity", LOG_LEVEL)
    return tuple(flags.argv)


def metadata_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """Return the arguments that override what the file says of the model: RoPE scaling, and fewer experts."""
    flags, launch = _Flags(facts), launch_of(plan)
    rope = launch.rope
    longer = (f"{rope.architecture}.context_length=int:{rope.context}",) if rope else ()
    if overrides := (*longer, *launch.overrides):
        flags.need("--override-kv", ",".join(overrides))  # once: the engine warns of a second one
    if rope and rope.factor is not None:
        flags.need("--rope-scaling", "yarn")
        flags.need("--rope-scale", f"{rope.factor:.6g}")
        flags.need("--yarn-orig-ctx", rope.original)
    return tuple(flags.argv)


def pooling_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """Return the arguments of an embedding model or reranker; empty for a model that generates text."""
    flags, pooling = _Flags(facts), launch_of(plan).extras.pooling
    if not plan.is_embedding:
        return ()
    if pooling == "rank":
        flags.need("--reranking")
        return tuple(flags.argv)
    flags.need("--embeddings")
    if pooling is not None:
        flags.need("--pooling", pooling)
    return tuple(flags.argv)


def beside_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """Return the arguments for projector and adapters. By default the engine puts the projector on its first GPU."""
    flags, extras = _Flags(facts), launch_of(plan).extras
    if extras.projector is not None:
        flags.need("--mmproj", extras.projector)
        if extras.projector_on_host and has_gpu_backend(facts):
            flags.need("--no-mmproj-offload")
    if extras.adapters:
        flags.need("--lora-scaled", ",".join(f"{path}:{scale:g}" for path, scale in extras.adapters))
    return tuple(flags.argv)


def extra_arguments(extras: Extras, facts: EngineFacts) -> tuple[str, ...]:
    """Return the arguments for options of the user. Their own arguments are last, because the last of two wins."""
    flags = _Flags(facts)
    if extras.chat_template_file is not None:
        flags.need("--chat-template-file", extras.chat_template_file)
    if extras.reasoning_format is not None:
        flags.need("--reasoning-format", extras.reasoning_format)
    return (*flags.argv, *extras.engine_args)


def placement_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """Return the arguments of the placement. They are always complete, because the engine's own fit gives up on a
    placement that is set in part."""
    flags = _Flags(facts)
    shares = plan.placement.shares
    if not shares:
        if has_gpu_backend(facts):
            flags.need("--device", "none")  # by default the engine uses every GPU that it sees
        return tuple(flags.argv)
    flags.need("--device", ",".join(f"CUDA{at}" for at in range(len(shares))))
    flags.need("--gpu-layers", plan.placement.gpu_layers)
    flags.need("--split-mode", plan.placement.split_mode)
    # Numbers of layers: the engine gives position k of n to the first device whose share of the sum exceeds k/n. In
    # split mode tensor they are parts of each matrix.
    split = plan.placement.parts or tuple(share.layers for share in shares)
    flags.need("--tensor-split", ",".join(map(str, split)))
    flags.need("--main-gpu", 0)
    if plan.placement.cpu_expert_layers:
        flags.need("--n-cpu-moe", plan.placement.cpu_expert_layers)
    return tuple(flags.argv)


def slot_arguments(plan: Plan, facts: EngineFacts, cache_dir: Path) -> tuple[str, ...]:
    """Return the arguments for slots of experts. Only the server gets them: other programs measure text and memory."""
    flags, slots = _Flags(facts), launch_of(plan).slots
    if slots is not None:
        flags.need("--moe-slots", slots.count)
        flags.need("--moe-rates", str(rates_path(plan, cache_dir)))
    return tuple(flags.argv)


def speculation_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """Return the arguments of speculative decoding; empty without it. Requests cannot change these settings."""
    flags, speculation = _Flags(facts), plan.speculation
    if speculation is None:
        return ()
    flags.need("--spec-type", _SPECULATION[speculation.kind])
    if speculation.kind == "ngram":
        flags.need("--spec-ngram-mod-n-max", speculation.tokens)
        flags.need("--spec-ngram-mod-n-min", 1)  # the default of 48 discards all shorter drafts
        return tuple(flags.argv)
    flags.need("--spec-draft-n-max", speculation.tokens)
    flags.use("--cache-type-k-draft", k_and_v(speculation.draft_kv_type)[0])
    flags.use("--cache-type-v-draft", k_and_v(speculation.draft_kv_type)[1])
    if speculation.draft_path is not None:
        flags.need("--model-draft", speculation.draft_path)
        if speculation.device is not None:
            flags.need("--device-draft", f"CUDA{speculation.device}")
            flags.need("--gpu-layers-draft", "all")
    return tuple(flags.argv)


def has_gpu_backend(facts: EngineFacts) -> bool:
    return any("cuda" in name for name in facts.backends)


def command(plan: Plan, install: Install, socket_path: Path) -> Command:
    """Return the command that the supervisor starts. The engine does not inherit the appliance's environment."""
    more = slot_arguments(plan, install.facts, install.cache_dir)
    argv = (str(install.engine_dir / BINARY), *arguments(plan, install.facts, socket_path), *more)
    job = command_of_job(argv, plan, install)
    is_healthy = _health(socket_path)
    return replace(
        job,
        is_ready=is_healthy,
        is_answering=is_healthy,
        work_done=partial(query_work, socket_path),
        upkeep=rates_upkeep(plan, install.cache_dir),
        socket_path=socket_path,
    )


def command_of_job(argv: tuple[str, ...], plan: Plan, install: Install) -> Command:
    """Return the command of another engine program. It works until it ends and is never ready, so the supervisor's
    stall timer runs all the time."""
    return Command(
        argv=argv,
        environment=environment(plan, install.engine_dir, install.cache_dir, install.driver_dir),
        is_ready=_never,
        is_error=is_error,
        stall_timeout_s=install.stall_timeout_s,
        is_at_work=gpu_work_of(share.gpu.id for share in plan.placement.shares),
        oom_kills=install.oom_kills,
    )


async def _never() -> bool:
    return False


def environment(plan: Plan, engine_dir: Path, cache_dir: Path, driver_dir: Path | None = None) -> dict[str, str]:
    """Return the engine's environment. With GPUs it names them in the plan's order: CUDA0 is the plan's first GPU."""
    if not plan.placement.shares:
        return cpu_environment(cache_dir, plan.cpu_variant)
    ids = ",".join(share.gpu.id for share in plan.placement.shares)
    found = gpu_environment(engine_dir, cache_dir, driver_dir, cpu_variant=plan.cpu_variant)
    return found | {"CUDA_VISIBLE_DEVICES": ids}


def gpu_environment(
    engine_dir: Path, cache_dir: Path, driver_dir: Path | None, *, cpu_variant: str | None = None
) -> dict[str, str]:
    """Return the environment of a program that sees every GPU."""
    found = cpu_environment(cache_dir, cpu_variant) | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_CACHE_PATH": str(cache_dir / "cuda"),
    }
    if driver_dir is not None:
        # The engine's own folder first: its libraries name it in DT_RUNPATH, which is searched after this variable, and
        # the driver's folder may hold another libcublas or libggml.
        found["LD_LIBRARY_PATH"] = f"{engine_dir}:{driver_dir}"
    return found


def variant_environment(cpu_variant: str | None) -> dict[str, str]:
    """Return the variable that makes the engine load this CPU variant only (images/patches/llama-cpu-choice.patch).

    Empty for None: the engine then loads the variant with the highest cpuid score.
    """
    return {"GGML_CPU_VARIANT": cpu_variant} if cpu_variant else {}


def cpu_environment(cache_dir: Path, cpu_variant: str | None) -> dict[str, str]:
    found = {"PATH": "/usr/bin:/bin", "HOME": str(cache_dir / "home"), "LANG": "C.UTF-8"}
    return found | variant_environment(cpu_variant)


# Warnings that are expected and not repeated, each with the reason; in the words of build 11312.
_AS_IT_SHOULD = (
    # The engine listens on a private socket, and the gateway in front of it checks the key.
    r"srv +llama_server: security: no API key is set",
    # The whole prompt is in the cache, for example of a repeated request: its last token is read again.
    r"slot +\S+: id +\d+ \| task \d+ \| need to evaluate at least 1 token for each active slot",
    r"slot +\S+: id +\d+ \| task \d+ \| n_past was set to \d+$",
    # A client disconnected, or stopped the generation because it had its answer.
    r"srv +stop: cancel task, id_task = \d+$",
    # One line for each matrix: the CPU's own layouts take no adapters. These are small, so they stay in plain layout.
    r"llama_adapter_lora_init_impl: lora for '\S+' cannot use buft '\S+', fallback to CPU$",
)
_SHOWN = re.compile(rf"\S+ (?:E |W (?!(?:{'|'.join(_AS_IT_SHOULD)})))|error")
_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|compute|output|LoRA|expert) (?:buffer size|slots)\s*=\s*([0-9.]+) MiB")
_DRAFTING = "adding speculative implementation"
_OF_PROJECTOR = "reserve_compute_meta"  # the projector's own buffer, which the plan's compute buffer does not include
_KINDS = {
    "model": "model", "LoRA": "model", "expert": "model", "KV": "kv", "RS": "recurrent", "compute": "compute",
    "output": "output",
}  # fmt: skip
_COPIES = ("CPU_REPACK", "AMX")  # layouts of the CPU backend's own
_GPU = re.compile(r"CUDA\d+")  # not CUDA_Host, which is pinned host memory


def parse_allocated(lines: Iterable[str]) -> Allocated:
    """Return the sums of the buffer sizes in the log: `load_tensors:   CPU_Mapped model buffer size =    92.10 MiB`."""
    sums = dict.fromkeys((*_KINDS.values(), "repacked"), 0.0)
    devices: dict[str, float] = {}
    is_drafting = False
    for line in lines:
        is_drafting = is_drafting or _DRAFTING in line
        if _OF_PROJECTOR in line or not (found := _BUFFER.search(line)):
            continue
        place, kind, size = found[1], _KINDS[found[2]], float(found[3])
        if is_drafting and kind == "compute":
            continue  # the draft's context is sized again: the buffer that was counted before is freed
        sums[kind] += size
        sums["repacked"] += size if place in _COPIES else 0.0
        if _GPU.fullmatch(place):
            devices[place] = devices.get(place, 0.0) + size
    return Allocated(**sums, kv_tokens=0, devices=tuple(sorted(devices.items())))


def is_worth_showing(line: str) -> bool:
    """Return True for warnings and errors of the engine, except expected warnings (`_AS_IT_SHOULD`).

    Other lines are kept for a crash, and are not repeated in the appliance's log.
    """
    return _SHOWN.match(line) is not None


def _health(socket_path: Path) -> Readiness:
    async def ask() -> bool:
        import asyncio  # here: it costs 20 ms, and `plan` has no event loop

        try:
            async with asyncio.timeout(5.0):
                return (await _answer(socket_path, "/health")).split(b" ", 2)[1:2] == [b"200"]
        except TimeoutError:
            return False

    return ask


async def query_work(socket_path: Path) -> tuple[object, ...] | None:
    """Return the tokens that each slot has read and made: a later value differs if slots have worked in between.

    None if the answer cannot be read. The engine answers between two batches.
    """
    try:
        return parse_work((await _answer(socket_path, SLOTS_PATH)).partition(b"\r\n\r\n")[2])
    except ValueError:
        return None


async def _answer(socket_path: Path, path: str) -> bytes:
    """Return head and body of the answer; empty if the engine does not answer.

    Written without an HTTP library, which costs a quarter of a second to import. Raises OSError if the appliance itself
    lacks memory or file descriptors, which says nothing about the engine.
    """
    import asyncio  # here: it costs 20 ms, and `plan` has no event loop

    writer = None
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n".encode())
        return await reader.read()
    except OSError as error:
        if is_lack(error):
            raise
        return b""
    finally:
        if writer is not None:
            writer.close()
