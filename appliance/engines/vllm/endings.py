"""How vLLM ended, as one of the errors of DESIGN.md section 6.

An exit code tells nothing: EngineCore or a worker may be killed, and the API server ends with 0. What decides, in this
order: the stall timer, the kernel's count of memory kills, then the first line that is understood, that of the deepest
process first. The last line never does. An ending that is not understood is 43 with its log, and never memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from appliance.engines.endings import DECISIVE, LAST_LINES, MORE, REBUILD, Judged, hint_of_unknown, judge_signal
from appliance.engines.engine import Ending
from appliance.engines.vllm.log import parse_line
from appliance.errors import (
    ConfigError,
    DriverTooOldError,
    EngineArgumentsError,
    EngineDiedError,
    EngineError,
    EngineGpuMemoryError,
    EngineHostMemoryError,
    EngineLibraryError,
    EngineNotReadyError,
    FatalError,
    GpuUnusableError,
    ModelUnreadableError,
    NoKernelError,
    VolumeError,
)
from appliance.plan import Shortage
from appliance.values import dataclass

_LESS = "use a smaller --ctx-size or --parallel, or free the GPU's memory; `appliance probe` names who holds it"
_SHM = "shared memory is too small for several processes: start the container with --shm-size 8g or --ipc=host"
_SEE_PLAN = "see `appliance plan --explain` for the command line and where each value comes from"
_FETCH = "fetch the model again; `appliance models list` shows what is on the volume"
_OTHER_GPU = "check `nvidia-smi` on the host and that the container was started with `--gpus`"


@dataclass(frozen=True, kw_only=True)
class Rule:
    words: re.Pattern[str]
    kind: type[FatalError]
    remedy: str
    name: str


def _rule(name: str, kind: type[FatalError], remedy: str, *words: str) -> Rule:
    return Rule(name=name, kind=kind, remedy=remedy, words=re.compile("|".join(words)))


# A line is tried from the top: what stands further down is wider.
RULES: tuple[Rule, ...] = (
    _rule("no driver library", GpuUnusableError, _OTHER_GPU, r"libcuda\.so\S*: cannot open shared object file"),
    _rule(
        "library missing",
        EngineLibraryError,
        REBUILD,
        r"error while loading shared libraries|cannot open shared object file|symbol lookup error|undefined symbol: ",
        r"version `\S+' not found|^ModuleNotFoundError: ",
    ),
    _rule("refused arguments", EngineArgumentsError, _SEE_PLAN, r"^(?:vllm|main\.py)(?: \w+)?: error: "),
    _rule(
        "no kernels",
        NoKernelError,
        "use an image that was built for this GPU's architecture; `appliance probe` shows it",
        r"no kernel image is available for execution",
    ),
    _rule(
        "driver too old",
        DriverTooOldError,
        "update the NVIDIA driver of the host, or use an image with an older CUDA release",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
        r"PTX was compiled with an unsupported toolchain|unsupported display driver / cuda driver combination",
    ),
    _rule(
        "no device",
        GpuUnusableError,
        _OTHER_GPU,
        r"Failed to infer device type|No CUDA GPUs are available|no CUDA-capable device is detected",
    ),
    _rule(
        "KV cache too small",
        EngineGpuMemoryError,
        "use a smaller --ctx-size, or leave it out: the longest context that fits is served then",
        r"To serve at least one request with the model's max seq len",
    ),
    _rule("no room for a KV cache", EngineGpuMemoryError, _LESS, r"No available memory for the cache blocks"),
    _rule(
        "less free than asked for",
        EngineGpuMemoryError,
        "another process holds this GPU's memory: `appliance probe` names it; free it, or set a larger --reserve-mib",
        r"Free memory on device .* on startup is less than ",
    ),
    _rule(
        "KV cache larger than the host's memory",
        EngineHostMemoryError,
        MORE,
        r"Available memory on node .* is less than requested memory",
    ),
    _rule(
        "shared memory",
        EngineHostMemoryError,
        _SHM,
        r"No space left on device: '?/dev/shm|/dev/shm/\S+.*No space left|creating shared memory segment",
        r"unable to (?:open|write to|resize) (?:shared memory object|file) </",
        r"Insufficient space in /dev/shm",
    ),
    _rule(
        "out of GPU memory",
        EngineGpuMemoryError,
        _LESS,
        r"CUDA out of memory|CUDA error: out of memory|torch\.OutOfMemoryError: CUDA|cudaErrorMemoryAllocation",
        r"CUBLAS_STATUS_ALLOC_FAILED|NCCL WARN Cuda failure 2\b",
    ),
    _rule(
        "out of host memory",
        EngineHostMemoryError,
        MORE,
        r"DefaultCPUAllocator: can't allocate memory|\[Errno 12\] Cannot allocate memory|^MemoryError(?::|$)",
        r"std::bad_alloc",
    ),
    _rule(
        "memory changed while it was measured",
        EngineNotReadyError,
        "another process freed memory of this GPU while the engine measured it: start again",
        r"Error in memory profiling",
    ),
    _rule(
        "heads do not divide",
        EngineArgumentsError,
        "the number of GPUs must divide the model's attention heads: choose others with --devices",
        r"must be divisible by tensor parallel size|is not divisible by weight quantization",
    ),
    _rule(
        "context above native",
        EngineArgumentsError,
        "use a smaller --ctx-size, or --rope-scaling yarn",
        r"is greater than the derived max_model_len",
    ),
    _rule(
        "bf16 on an old GPU",
        EngineArgumentsError,
        "this GPU computes in float16: leave the type to the plan",
        r"Bfloat16 is only supported on GPUs",
    ),
    _rule(
        "fp8 KV cache on an old GPU",
        EngineArgumentsError,
        "leave --kv-type out, or set it to auto",
        r"FP8 KV cache is not supported",
    ),
    _rule(
        "more ranks than GPUs",
        EngineArgumentsError,
        "use as many --devices as the container has",
        r"World size \(\d+\) is larger than the number of available GPUs",
    ),
    _rule(
        "not for this GPU",
        EngineArgumentsError,
        "use a model in another quantization; `appliance plan --explain` says which this GPU computes",
        r"is not supported for the current GPU\. Minimum capability|No valid attention backend found",
    ),
    _rule(
        "environment is no number",
        ConfigError,
        "a variable VLLM_* of the container is not a whole number: take it out",
        r"^  Value error, invalid literal for int\(\) with base 10",
    ),
    _rule(
        "volume is full",
        VolumeError,
        "the volume is full, or its disk: free some of it; `appliance models list` shows what lies there",
        r"\[Errno 28\] No space left on device(?!: '/(?:tmp|dev)/)",
    ),
    _rule(
        "kernel too large for the chip",
        EngineNotReadyError,
        "a kernel wants more of this chip's own fast memory than it has: choose another with "
        '--engine-arg "--attention-backend NAME", and report it with the lines above',
        r"OutOfResources: out of resource: ",
    ),
    _rule(
        "a step took too long",
        EngineNotReadyError,
        "one of its processes was silent for longer than vLLM waits, 300 s by itself: set "
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS to more",
        r"TimeoutError: RPC call to \S+ timed out",
    ),
    _rule(
        "packages of the model's own code",
        ModelUnreadableError,
        "the code in the model's folder needs packages that the image has not: use another upload of it",
        r"This modeling file requires the following packages",
    ),
    _rule(
        "needs code of its own",
        ModelUnreadableError,
        "the model's folder brings code, which is not run: use another upload of it",
        r"contains custom code which must be executed",
    ),
    _rule(
        "unknown architecture",
        ModelUnreadableError,
        "this image's engine is too old for the model, or has no support for it: use a newer image or another model",
        r"does not recognize this architecture|Model architectures .* (?:are not supported|failed to be inspected)",
    ),
    _rule(
        "compiled file missing",  # above the model's: of it no file lies there, whatever the ending of its name
        EngineNotReadyError,
        "what was compiled before is not whole: remove that folder from the volume, and the next start makes it anew",
        r"No such file or directory: .*/cache/[^/']+/(?:vllm|inductor|triton|flashinfer|deep_gemm|xdg|cuda)/",
    ),
    _rule(
        "model missing or damaged",
        ModelUnreadableError,
        _FETCH,
        r"Invalid repository ID or local directory specified|HFValidationError|Cannot find any model weights",
        r"SafetensorError|No such file or directory: .*\.(?:safetensors|json|bin|model)\b|is not a valid JSON file",
        r"Can't load (?:the configuration|tokenizer)|There is no module or parameter named",
        r"Following weights were not initialized from checkpoint|Couldn't instantiate the backend tokenizer",
    ),
    _rule(
        "socket in use",
        EngineNotReadyError,
        "its socket is taken, which is an error of the appliance: please report it with the lines above",
        r"\[Errno 98\] Address already in use",
    ),
)
_MEMORY = (EngineGpuMemoryError, EngineHostMemoryError)

# None: what tells that it ended came before its exit code, seen in two kills of three on one machine.
_KILLED = re.compile(r"died unexpectedly \(exit code: (?:-9|None)\)|Failed core proc\(s\): \{[^}]*: -9\b")
_LOST = re.compile(r"Worker proc \S+ died unexpectedly")
_LONGEST = re.compile(r"the estimated maximum model length is (\d+)")
_KV_NEEDED = re.compile(r"\(([0-9.]+) GiB KV cache is needed.*available KV cache memory \(([0-9.]+) GiB\)")
_FREE_OF = re.compile(
    r"Free memory on device (\S+) \(([0-9.]+)/[0-9.]+ GiB\) on startup is less than .*, ([0-9.]+) GiB\)"
)
_NODE = re.compile(r"Available memory on node \d+ \(([0-9.]+)/[0-9.]+ GiB\) .* requested memory for kv \(([0-9.]+)")
_TRIED = re.compile(
    r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)\. GPU (\d+) .*? of which ([0-9.]+) (bytes|KiB|MiB|GiB) is free"
)
_TRIED_HOST = re.compile(r"tried to allocate (\d+) bytes")
_MIB = {"bytes": 2.0**-20, "KiB": 2.0**-10, "MiB": 1.0, "GiB": 1024.0}


def as_error(ending: Ending, *, served: bool = False) -> FatalError:
    """Which error an ending is; `served` when the engine had been ready before, if not this time.

    Once it has served, any end is 45, also with exit code 0, with the first cause.
    """
    message = f"engine vllm {ending.describe()}"
    found = None if ending.stalled else _judge(ending)  # whatever it said, the stall timer ended it
    kind, hint, line = found or (EngineNotReadyError, _unknown(ending), None)
    if line is not None and line != ending.first_error:
        message += f"; the cause is {line}"
    was_memory = issubclass(kind, _MEMORY)
    if ending.was_ready or served:
        kind = EngineDiedError
        hint = f"{hint if was_memory else LAST_LINES}; a restart policy starts the container again"
    if not issubclass(kind, EngineError):
        return kind(message, hint=hint, log=ending.log)
    lack = _lack(line) if was_memory and line else None
    return kind(
        message,
        hint=hint,
        log=ending.log,
        was_memory=was_memory,
        needed_mib=lack.refused_mib if lack else None,
        device=lack.device if lack else None,
    )


def cause_of(ending: Ending) -> tuple[Rule, str] | None:
    """The rule that understands a line, and that line; the deepest process's first one. None for an unknown ending."""
    for line in _causes(ending):
        text = parse_line(line).text
        for rule in RULES:
            if rule.words.search(text) and not _is_of_a_request(ending, line, rule.kind):
                return rule, line
    return None


def _is_of_a_request(ending: Ending, line: str, kind: type[FatalError]) -> bool:
    """Once it serves, the API server logs what clients send, and has no memory of a GPU: nothing of it is a cause."""
    return ending.was_ready and issubclass(kind, _MEMORY) and parse_line(line).process == "APIServer"


def shortage_of(error: FatalError, lines: Iterable[str]) -> Shortage | None:
    """What an engine lacked that ran out of memory as it loaded. None for any other ending, and where its log tells no
    size. `lines` are its whole log."""
    if not isinstance(error, _MEMORY):
        return None
    log = (*error.log, *lines)
    causes = [line for line in (error.message, *log) if line is error.message or parse_line(line).is_cause]
    return next((found for line in causes if (found := _lack(line))), None)


def _lack(line: str) -> Shortage | None:
    """What a line says of sizes; the free ones as it says them."""
    if found := _KV_NEEDED.search(line):
        longest = _LONGEST.search(line)
        return Shortage(
            refused_mib=max(0.0, float(found[1]) - float(found[2])) * 1024,
            context=int(longest[1]) if longest else None,
        )
    if found := _FREE_OF.search(line):
        wanted, free = float(found[3]) * 1024, float(found[2]) * 1024
        return Shortage(refused_mib=wanted, device=found[1], free_mib=free, is_whole=True)
    if found := _TRIED.search(line):
        refused, free = float(found[1]) * _MIB[found[2]], float(found[4]) * _MIB[found[5]]
        return Shortage(refused_mib=refused, device=f"cuda:{found[3]}", free_mib=free)
    if found := _NODE.search(line):
        return Shortage(refused_mib=float(found[2]) * 1024, free_mib=float(found[1]) * 1024)
    if found := _TRIED_HOST.search(line):
        return Shortage(refused_mib=float(found[1]) * 2.0**-20)
    return None


def _judge(ending: Ending) -> Judged | None:
    """None for what is not understood."""
    if ending.signal in DECISIVE:
        return judge_signal(ending)
    if ending.oom_kills and (killed := _line_of_a_kill(ending.log)):
        return EngineHostMemoryError, MORE, killed
    if found := cause_of(ending):
        return found[0].kind, found[0].remedy, found[1]
    return (EngineNotReadyError, _unknown(ending), killed) if (killed := _line_of_a_kill(ending.log)) else None


def _line_of_a_kill(log: Sequence[str]) -> str | None:
    """What says that one of its processes was killed: only the kernel's count tells by whom."""
    return next((line for line in log if _KILLED.search(line) or "engine core exited unexpectedly" in line), None)


def _unknown(ending: Ending) -> str:
    was_killed = _line_of_a_kill(ending.log) is not None and not any(_is_raised(line) for line in ending.log)
    return hint_of_unknown(ending, lost_a_process=was_killed)


def _is_raised(line: str) -> bool:
    """Whether a process behind the API server ended by itself, and said of what."""
    found = parse_line(line)
    return found.depth > 0 and found.is_cause and not _LOST.match(found.text)


def _causes(ending: Ending) -> Iterator[str]:
    """Lines that may be the cause: the deepest process first, then in their order. The first may have left the log."""
    first = [ending.first_error] if ending.first_error is not None and ending.first_error not in ending.log else []
    parsed = [(line, parse_line(line)) for line in (*first, *ending.log)]
    if ending.was_ready and ending.first_error in ending.log:
        # What single requests failed of before is no cause of this end.
        parsed = parsed[ending.log.index(ending.first_error) :]
    found = [(line, each.depth) for line, each in parsed if each.is_cause]
    yield from (line for line, _ in sorted(found, key=lambda pair: -pair[1]))
