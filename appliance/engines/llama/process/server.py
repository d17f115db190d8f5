"""llama-server: Plan -> Command, and what its output means. Every flag of it lives here and nowhere else."""

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
from appliance.engines.llama.process.facts import BINARY
from appliance.engines.llama.process.log import is_error
from appliance.errors import EngineArgumentsError
from appliance.image_facts import EngineFacts
from appliance.plan import Allocated, Plan, k_and_v
from appliance.system.lack import is_lack

_SPECULATION = {"draft": "draft-simple", "mtp": "draft-mtp", "ngram": "ngram-mod"}
# `parse_allocated` reads buffer sizes, and what every library says at its level "info" appears at 4, not at the default
# 3. It cannot be lowered later; at 4 a request costs some twenty lines without its text, which are kept for a crash and
# not repeated.
LOG_LEVEL = 4
# The share of a request that a slot must hold to be taken. A turn longer than all before it does not find its
# conversation any more: less than half of its tokens are read that could have been kept.
KEPT_SIMILARITY = "0.5"


class _Flags:
    """Collects an argument list of flags that this binary has; a flag that it lacks is refused before it is started."""

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
        """For what is good to have: left out where the binary does not know it."""
        if flag in self._known:
            self.need(flag, value)


def arguments(plan: Plan, facts: EngineFacts, socket_path: Path) -> tuple[str, ...]:
    """The engine's whole argument list, explicit in everything that a plan decides."""
    flags, launch = _Flags(facts), launch_of(plan)
    flags.need("--model", plan.model_path)
    flags.need("--alias", plan.alias)
    flags.need("--host", str(socket_path))
    flags.need("--fit", "off")  # its own fit reads the host's memory, knows no cgroup, and costs 0.17 s a start
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
        # Else a slot is saved before another request takes it only if that shares less than half of the conversation.
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
    flags.argv += rope_arguments(plan, facts)
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


def rope_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """Nothing up to the model's native length."""
    flags, rope = _Flags(facts), launch_of(plan).rope
    if rope is None:
        return ()
    flags.need("--override-kv", f"{rope.architecture}.context_length=int:{rope.context}")
    if rope.factor is not None:
        flags.need("--rope-scaling", "yarn")
        flags.need("--rope-scale", f"{rope.factor:.6g}")
        flags.need("--yarn-orig-ctx", rope.original)
    return tuple(flags.argv)


def pooling_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """Nothing for a model that gives text."""
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
    """The projector takes the first GPU that the engine sees, if not told otherwise."""
    flags, extras = _Flags(facts), launch_of(plan).extras
    if extras.projector is not None:
        flags.need("--mmproj", extras.projector)
        if extras.projector_on_host and has_gpu_backend(facts):
            flags.need("--no-mmproj-offload")
    if extras.adapters:
        flags.need("--lora-scaled", ",".join(f"{path}:{scale:g}" for path, scale in extras.adapters))
    return tuple(flags.argv)


def extra_arguments(extras: Extras, facts: EngineFacts) -> tuple[str, ...]:
    """A user's own arguments are last: of two of a kind the engine takes the later."""
    flags = _Flags(facts)
    if extras.chat_template_file is not None:
        flags.need("--chat-template-file", extras.chat_template_file)
    if extras.reasoning_format is not None:
        flags.need("--reasoning-format", extras.reasoning_format)
    return (*flags.argv, *extras.engine_args)


def placement_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """All of it or nothing: a combination that is set by half is what the engine's own fit gives up on."""
    flags = _Flags(facts)
    shares = plan.placement.shares
    if not shares:
        if has_gpu_backend(facts):
            flags.need("--device", "none")  # else it takes every GPU that it sees
        return tuple(flags.argv)
    flags.need("--device", ",".join(f"CUDA{at}" for at in range(len(shares))))
    flags.need("--gpu-layers", plan.placement.gpu_layers)
    flags.need("--split-mode", plan.placement.split_mode)
    # Counts of layers: the engine gives position k of n to the first device whose share of the sum exceeds k/n. In
    # split mode tensor parts of each matrix.
    split = plan.placement.parts or tuple(share.layers for share in shares)
    flags.need("--tensor-split", ",".join(map(str, split)))
    flags.need("--main-gpu", 0)
    if plan.placement.cpu_expert_layers:
        flags.need("--n-cpu-moe", plan.placement.cpu_expert_layers)
    return tuple(flags.argv)


def speculation_arguments(plan: Plan, facts: EngineFacts) -> tuple[str, ...]:
    """Nothing without speculation: the engine's default is none. Requests cannot change any of it."""
    flags, speculation = _Flags(facts), plan.speculation
    if speculation is None:
        return ()
    flags.need("--spec-type", _SPECULATION[speculation.kind])
    if speculation.kind == "ngram":
        flags.need("--spec-ngram-mod-n-max", speculation.tokens)
        flags.need("--spec-ngram-mod-n-min", 1)  # its own 48 gives up whatever is known of fewer tokens
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
    """What the supervisor starts. The child gets a small environment of its own: nothing of ours leaks into it."""
    argv = (str(install.engine_dir / BINARY), *arguments(plan, install.facts, socket_path))
    job = command_of_job(argv, plan, install)
    is_healthy = _health(socket_path)
    return replace(
        job,
        is_ready=is_healthy,
        is_answering=is_healthy,
        work_done=partial(query_work, socket_path),
        socket_path=socket_path,
    )


def command_of_job(argv: tuple[str, ...], plan: Plan, install: Install) -> Command:
    """Of another of the engine's programs, which is never ready: it works until it ends, so that a supervisor's stall
    timer runs all the time."""
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
    """With GPUs also which ones, in the plan's order, so that the engine's CUDA0 is the plan's first."""
    if not plan.placement.shares:
        return cpu_environment(cache_dir, plan.cpu_variant)
    ids = ",".join(share.gpu.id for share in plan.placement.shares)
    found = gpu_environment(engine_dir, cache_dir, driver_dir, cpu_variant=plan.cpu_variant)
    return found | {"CUDA_VISIBLE_DEVICES": ids}


def gpu_environment(
    engine_dir: Path, cache_dir: Path, driver_dir: Path | None, *, cpu_variant: str | None = None
) -> dict[str, str]:
    """With every GPU to be seen."""
    found = cpu_environment(cache_dir, cpu_variant) | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_CACHE_PATH": str(cache_dir / "cuda"),
    }
    if driver_dir is not None:
        # The engine's own folder first: its libraries carry it as DT_RUNPATH, which comes after this variable, and a
        # folder of drivers may hold a libcublas or a libggml of somebody else's.
        found["LD_LIBRARY_PATH"] = f"{engine_dir}:{driver_dir}"
    return found


def variant_environment(cpu_variant: str | None) -> dict[str, str]:
    """With a variant the engine opens that one and no other (images/patches/llama-cpu-choice.patch); without, the one
    that scores highest by cpuid."""
    return {"GGML_CPU_VARIANT": cpu_variant} if cpu_variant else {}


def cpu_environment(cache_dir: Path, cpu_variant: str | None) -> dict[str, str]:
    found = {"PATH": "/usr/bin:/bin", "HOME": str(cache_dir / "home"), "LANG": "C.UTF-8"}
    return found | variant_environment(cpu_variant)


# What the engine warns of and is as it should be, each with its reason; in the words of build 11312.
_AS_IT_SHOULD = (
    # True of the engine alone: it listens on a private socket, and the gateway before it asks for the key.
    r"srv +llama_server: security: no API key is set",
    # A prompt that is in the cache as a whole, as when the same is asked again: its last token is read once more.
    r"slot +\S+: id +\d+ \| task \d+ \| need to evaluate at least 1 token for each active slot",
    r"slot +\S+: id +\d+ \| task \d+ \| n_past was set to \d+$",
    # A client that left, or that had its answer: whoever stops a generation does so.
    r"srv +stop: cancel task, id_task = \d+$",
    # One line a matrix: the CPU's own layouts take no adapters, which are small, and are multiplied as they are.
    r"llama_adapter_lora_init_impl: lora for '\S+' cannot use buft '\S+', fallback to CPU$",
)
_SHOWN = re.compile(rf"\S+ (?:E |W (?!(?:{'|'.join(_AS_IT_SHOULD)})))|error")
_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|compute|output|LoRA) buffer size\s*=\s*([0-9.]+) MiB")
_DRAFTING = "adding speculative implementation"
_OF_PROJECTOR = "reserve_compute_meta"  # its own buffer, which is no part of the plan's compute buffer
_KINDS = {"model": "model", "LoRA": "model", "KV": "kv", "RS": "recurrent", "compute": "compute", "output": "output"}
_COPIES = ("CPU_REPACK", "AMX")  # layouts of the CPU backend's own
_GPU = re.compile(r"CUDA\d+")  # and neither CUDA_Host, which is pinned host memory, nor CPU_Mapped


def parse_allocated(lines: Iterable[str]) -> Allocated:
    """From lines like `load_tensors:   CPU_Mapped model buffer size =    92.10 MiB`."""
    sums = dict.fromkeys((*_KINDS.values(), "repacked"), 0.0)
    devices: dict[str, float] = {}
    is_drafting = False
    for line in lines:
        is_drafting = is_drafting or _DRAFTING in line
        if _OF_PROJECTOR in line or not (found := _BUFFER.search(line)):
            continue
        place, kind, size = found[1], _KINDS[found[2]], float(found[3])
        if is_drafting and kind == "compute":
            continue  # the draft's context, sized anew: its first buffer stands above, and is gone
        sums[kind] += size
        sums["repacked"] += size if place in _COPIES else 0.0
        if _GPU.fullmatch(place):
            devices[place] = devices.get(place, 0.0) + size
    return Allocated(**sums, kv_tokens=0, devices=tuple(sorted(devices.items())))


def is_worth_showing(line: str) -> bool:
    """Warnings and errors of the engine, but for what is as it should be; the rest is kept for a crash and not repeated
    in our log."""
    return _SHOWN.match(line) is not None


def _health(socket_path: Path) -> Readiness:
    async def ask() -> bool:
        import asyncio  # here: it costs 20 ms, and `plan` has no loop

        try:
            async with asyncio.timeout(5.0):
                return (await _answer(socket_path, "/health")).split(b" ", 2)[1:2] == [b"200"]
        except TimeoutError:
            return False

    return ask


async def query_work(socket_path: Path) -> tuple[object, ...] | None:
    """Return what its slots have read and made, which differs once they have worked on; None if it does not tell. It
    answers between two batches."""
    try:
        return parse_work((await _answer(socket_path, SLOTS_PATH)).partition(b"\r\n\r\n")[2])
    except ValueError:
        return None


async def _answer(socket_path: Path, path: str) -> bytes:
    """Return head and body, empty if nobody answers. By hand: an HTTP library costs a quarter of a second to import.
    Raises OSError for a lack of ours, which says nothing of the engine."""
    import asyncio  # here: it costs 20 ms, and `plan` has no loop

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
