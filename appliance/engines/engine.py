"""The interface of an engine: everything that the rest of the appliance calls. `load` is the only way to get one.

An engine is a folder next to this file with a module `engine.py`, whose constant ENGINE implements `Engine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from appliance import engines
from appliance.command import Command, Readiness
from appliance.engine_route import EngineRoute, ErrorRule, MetricAlias
from appliance.errors import ConfigError, FatalError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.plan import (
    Allocated,
    Choice,
    Compilation,
    Costs,
    Kernels,
    Kind,
    KnobEffect,
    KvCheck,
    Launch,
    MemoryPeak,
    Offer,
    Plan,
    RuledOut,
    Shortage,
    Speculation,
)
from appliance.probe import Cpu, Gpu, GpuProbe, Hardware
from appliance.settings import Settings
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.console.report import Report
    from appliance.model import Format, Model


_NOT_OFFERED = "the engine's space offers nothing that needs it"


@dataclass(frozen=True, kw_only=True)
class Node:
    """Place of this host in a group of hosts that serve one model together, for one start of the group."""

    nodes: int
    rank: int  # 0 is the leader
    address: str  # of this host, as the others reach it
    leader: str  # address of the leader
    port: int  # on the leader, free for the engine
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables for the engine's network
    is_ready: Readiness | None = None  # on followers, which have no server of their own: True once the group answers


@dataclass(frozen=True, kw_only=True)
class Host:
    """Another host of the group, as that host describes itself."""

    name: str
    gpus: tuple[Gpu, ...]  # GPUs that it may use, in the order of its ranks
    shm_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class Install:
    """Location of the engine and what each of its programs is started with. Made once; only `node` is new for each
    start of a group."""

    engine_dir: Path
    facts: EngineFacts
    cache_dir: Path  # of this build, on the volume
    driver_dir: Path | None = None  # folder of the GPU driver's libraries, if the dynamic loader does not search it
    stall_timeout_s: float = 120.0
    oom_kills: Callable[[], int | None] | None = None
    node: Node | None = None  # None: this host serves alone


@dataclass(frozen=True, kw_only=True)
class PromptFolder:
    """Where a serving engine keeps prompts with their state over restarts, shared by all engines of the volume."""

    path: Path
    limit_mib: int  # of all files in it
    secret: str  # 32 hexadecimal digits; engines use no file that was not made with it
    model: str  # 16 hexadecimal digits of the model's digest, with which the names of its files begin
    attached: tuple[str, ...]  # digests of draft model, projector and adapters


@dataclass(frozen=True, kw_only=True)
class ExpertFiles:
    """Files on the volume about one mixture's experts. Their folder is there."""

    uses: Path  # how often each expert was used: the next start fills its slots by them
    trace: Path | None  # the experts of each token; None: not recorded


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that plans are made from. Made once; `kernels` changes when a CPU variant is ruled out, and `hosts`
    when the other hosts have joined."""

    settings: Settings
    image: ImageFacts
    facts: EngineFacts
    hardware: Hardware
    model: Model
    kernels: Kernels
    draft: Model | None = None  # the draft model of speculative decoding
    hosts: tuple[Host, ...] = ()  # the other hosts by rank; empty before they join, which means: like this one
    dram_gb_s_max: float = math.inf  # upper bound of the assumed host memory bandwidth, if it was not measured
    host_mib_max: float = math.inf  # host memory that plans may use: the kernel killed an engine that used more
    memory_peaks: tuple[MemoryPeak, ...] = ()  # GPU memory seen while earlier starts served

    @property
    def draft_path(self) -> str | None:
        return str(self.draft.path) if self.draft else None

    def with_kernels(self, kernels: Kernels) -> Inputs:
        return replace(self, kernels=kernels)


@dataclass(frozen=True, kw_only=True)
class Devices:
    """GPUs that the engine sees. `names` are in the engine's order. `said` is its last message on why there is none."""

    names: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class KernelResult:
    """Result of checking one set of kernels. It passed if both `problem` and `error` are empty."""

    name: str
    words: str = ""
    problem: str = ""  # why the set was not checked
    error: FatalError | None = None  # what is wrong with the set
    hint: str = ""  # what to do about `problem`


@dataclass(frozen=True, kw_only=True)
class ChunkSpec:
    """Amount of text for measuring quality: chunks of equal length, each read with an empty cache."""

    chunk_tokens: int
    chunks: int

    @property
    def scored_in_chunk(self) -> int:
        """Tokens whose prediction counts: the first half of a chunk only fills the cache, and the last has no
        successor."""
        return self.chunk_tokens - self.chunk_tokens // 2 - 1

    @property
    def read(self) -> int:
        return self.chunk_tokens * self.chunks


@dataclass(frozen=True, kw_only=True)
class LoadStep:
    """Progress of a load, read from one line of the engine's log. `facts` become fields of the phase's document."""

    stage: str
    words: str
    facts: Mapping[str, str]


class Ending(Protocol):
    """Report of the supervisor on a program that ended."""

    @property
    def signal(self) -> int | None: ...
    @property
    def first_error(self) -> str | None: ...
    @property
    def log(self) -> tuple[str, ...]: ...
    @property
    def was_ready(self) -> bool: ...
    @property
    def stalled(self) -> bool: ...
    @property
    def oom_kills(self) -> int | None: ...
    def describe(self) -> str: ...


class Space(Protocol):
    """All plans for one set of inputs. Methods with a body here are defaults; an engine need not define them."""

    @property
    def best(self) -> Plan:
        """Plan with the best estimate, without speculative decoding."""

    @property
    def predicted(self) -> Plan:
        """Plan that is served if nothing was measured. Raises ModelDoesNotFitError (31)."""
        return self.best

    @property
    def native(self) -> int:
        """Native context length of the model, or the length that was asked for."""

    def all(self) -> list[Plan]:
        """Return every plan that fits, the best first."""

    def at_context(self, plan: Plan, context: int) -> Plan | None:
        """Return the plan with another context length, or None if it does not fit."""

    def now(self, measured: Plan, allocated: Allocated | None = None) -> Plan | str:
        """Return a plan of an earlier start, adapted to the memory that is free now, or a sentence on what is missing.
        `allocated` is what the engine allocated in that start."""

    def offers(self) -> tuple[Offer, ...]:
        """Return the kinds of speculative decoding that model and engine support, the most promising first. Raises
        ConfigError (10) if the user asked for a kind that is not supported."""
        return ()

    def speculation(self, plan: Plan, kind: Kind, tokens: int) -> Speculation:
        """Return the memory and settings that this kind of speculative decoding adds to the plan. `kind` is one of
        `offers`."""
        raise ValueError(_NOT_OFFERED)

    def speculating(self, plan: Plan, speculation: Speculation, choice: Choice | None = None) -> Plan:
        """Return the plan with this speculative decoding. Raises ModelDoesNotFitError (31) if it does not fit."""
        raise ValueError(_NOT_OFFERED)

    def speculating_as(self, plan: Plan, measured: Plan) -> Plan:
        """Return `plan` with the speculative decoding of `measured`, or unchanged if that is no longer possible."""
        return plan

    def costs(self, plan: Plan) -> Costs:
        """Return the work per token and step, from which the predictor estimates speed."""

    @property
    def knob_effects(self) -> Mapping[str, KnobEffect]:
        """Effects on speed that `costs` does not contain, by knob of `Plan.knobs`."""
        return {}

    def kv_tokens(self, plan: Plan) -> int | None:
        """Return the predicted capacity of the KV cache in tokens, for all requests together, to compare with
        `Allocated`. None if it is not predicted."""
        return None

    def kv_mib(self, plan: Plan, tokens: int) -> tuple[float, ...]:
        """Return the size of a KV cache of `tokens` on each GPU of the plan, MiB. Empty if this engine's plans do not
        use memory that was observed while it served."""
        return ()

    def needs(self, plan: Plan) -> tuple[tuple[str, float, float], ...]:
        """Return for each place of memory its name, the MiB that the plan needs, and the MiB that it may use."""
        return ()

    def after(self, plan: Plan, shortage: Shortage) -> Reduced | None:
        """Return a space of plans for less memory: less by the amount that was missing when the plan was loaded. None
        if the plan takes nothing in the place of the shortage."""
        return None

    def kinds_to_check(self) -> tuple[str, ...]:
        """Return KV cache types that would allow a much longer context, if a check of quality passes them."""
        return ()

    def exact(self, plan: Plan) -> Plan | None:
        """Return the plan with an exact KV cache, to compare answers with; its context may be shorter. None if the
        plan's type of cache needs no comparison, or if no exact one fits."""
        return None


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """Space of plans after an engine ran out of memory in the place `where`. `taken_mib` returns what a plan takes
    there."""

    space: Space
    missing_mib: float
    where: str
    taken_mib: Callable[[Plan], float]

    def is_smaller(self, after: Plan, before: Plan) -> bool:
        """True if `after` takes less memory in this place than `before`; otherwise another load would fail again."""
        return self.taken_mib(after) < self.taken_mib(before)


class Guard(Protocol):
    """Check of an engine's kernels before they first serve on this machine."""

    @property
    def is_checking(self) -> bool: ...

    @property
    def known(self) -> RuledOut:
        """Variants ruled out and variants checked so far."""

    def begin(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> None:
        """Start the check, unless an earlier start completed it. Needs a running event loop."""

    async def finish(self) -> tuple[str, str] | None:
        """Wait for the check; return the variant that failed and what was seen, or None if all passed."""

    def rule_out(self, variant: str, seen: str) -> RuledOut:
        """Rule out a variant for this and later starts; return everything that is ruled out."""

    def give_up(self) -> None: ...


class NoGuard:
    """Guard of an engine whose kernels need no check."""

    is_checking = False
    known = RuledOut()

    def begin(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> None: ...

    async def finish(self) -> tuple[str, str] | None:
        return None

    def rule_out(self, variant: str, seen: str) -> RuledOut:
        return RuledOut(seen={variant: seen})

    def give_up(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Work and time of one completion, by the engine's own clock. Prefill yields the first token, so `made` tokens need
    `made - 1` decode steps."""

    read: int  # prompt tokens that were computed
    cached: int  # prompt tokens that were found in the cache
    made: int  # generated tokens
    tokens: tuple[int, ...]  # ids of the generated tokens
    prefill_ms: float  # for the `read` tokens
    decode_ms: float
    drafted: int = 0  # draft tokens
    accepted: int = 0
    slot: int | None = None  # the slot that keeps the prompt; None without slots


class Client(Protocol):
    """Client of one running engine. Raises EngineNotReadyError (43) if the engine refuses or breaks off."""

    async def tokenize(self, text: str, *, as_chat: bool = False) -> list[int]:
        """Return the tokens of a text; with `as_chat`, of a user message in the model's chat template."""

    async def complete(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        uses_cache: bool = True,
        slot: int | None = None,
        seed: int | None = None,
    ) -> Completion:
        """Complete a prompt. Without `seed`: greedy and exactly `tokens` long. With `seed`: sampled with the model's
        defaults, and it may end earlier. `uses_cache` lets the engine reuse cached prompt tokens. If `slot` is None,
        the engine chooses one."""


class LikelyClient(Client, Protocol):
    """Client of an engine that also tells the probabilities of tokens."""

    async def likely(self, prompt: Sequence[int], count: int) -> Mapping[int, float]:
        """Return the most likely next tokens, at least one and at most `count`, with their log probability."""


class TextReader(Protocol):
    """One run of a program that measures how well the model predicts a text, chunk by chunk. `add` gets its log."""

    @property
    def name(self) -> str:
        """Name of the program."""

    @property
    def command(self) -> Command: ...

    @property
    def chunks(self) -> int | None:
        """Number of chunks that the program announced; None before it did."""

    @property
    def rows(self) -> int:
        """Number of chunks read so far."""

    @property
    def nll(self) -> tuple[float, ...]:
        """Negative log-likelihood in nats per scored token, one mean for each chunk."""

    def add(self, line: str) -> None: ...

    def as_error(self, ending: Ending) -> FatalError: ...


class Quantizer(Protocol):
    """One run of a program that quantizes a model file."""

    @property
    def command(self) -> Command: ...

    def as_error(self, ending: Ending) -> FatalError: ...


class Engine(Protocol):
    """One engine. It has no state between calls except files on the volume. Methods with a body here are defaults; an
    engine need not define them."""

    @property
    def name(self) -> str:
        """Name of the engine, the same as in the image's facts."""

    @property
    def binary(self) -> str:
        """Path of the server program below `Install.engine_dir`."""

    @property
    def model_format(self) -> Format:
        """File format of the models that this engine serves."""

    @property
    def settings(self) -> frozenset[str]:
        """Names from ENGINE_SETTINGS that this engine supports, and `nodes` if it can serve on several hosts."""

    @property
    def launch(self) -> type[Launch]:
        """Type of `Plan.launch` in plans of this engine."""

    @property
    def routes(self) -> tuple[EngineRoute, ...]: ...

    @property
    def errors(self) -> tuple[ErrorRule, ...]:
        """Rules that replace some of the engine's error messages with messages for clients of the appliance."""
        return ()

    @property
    def checks_model_name(self) -> bool:
        """True if the engine refuses requests whose model name differs from the plan's alias."""
        return False

    @property
    def measures_in_service(self) -> bool:
        """True if the plan that serves is measured on its own engine, between requests. It pays for an engine that
        loads slowly, and must not cost clients their cached prompts."""
        return False

    @property
    def dropped_headers(self) -> frozenset[bytes]:
        """Request headers, in lower case, that are not forwarded to the engine."""
        return frozenset()

    @property
    def metric_aliases(self) -> tuple[MetricAlias, ...]:
        """Second names of metrics, which boards and balancers made for this engine look for."""
        return ()

    @property
    def kv_use_path(self) -> str | None:
        """Path on the engine's server that reports KV cache usage; None if there is none."""
        return None

    def parse_kv_use(self, answer: bytes, plan: Plan) -> float:
        """Return the share of the KV cache that running requests use, 0 to 1, from the answer at `kv_use_path`. Raises
        ValueError if the answer has no such figure."""
        raise ValueError(_NOT_OFFERED)

    @property
    def counts_path(self) -> str | None:
        """Path on the engine's server that counts prompts on disk and uses of experts; None if there is none."""
        return None

    def parse_counts(self, answer: bytes) -> Mapping[str, float]:
        """Return the counts from the answer at `counts_path`, by the names of the appliance's metrics without
        `appliance_`. Raises ValueError if the answer cannot be read."""
        raise ValueError(_NOT_OFFERED)

    def query_facts(self, binary: Path, *, cpu_variant: str | None = None) -> EngineFacts:
        """Run the program and return its facts. Raises EngineLibraryError (44), EngineArgumentsError (40), or OSError
        if the program does not exist."""

    def query_installed(self, install: Install, *, cpu_variant: str | None = None) -> EngineFacts:
        """Return the facts that the installed engine reports on this machine. Raises the same errors as
        `query_facts`."""
        return self.query_facts(install.engine_dir / self.binary, cpu_variant=cpu_variant)

    def facts_in_cell(
        self, facts: EngineFacts, image: ImageFacts, *, kv_pairs: tuple[tuple[str, str], ...], is_arm: bool
    ) -> EngineFacts:
        """Return the engine facts of an image that was not built, derived from `facts` of a built image with the same
        pin.

        `kv_pairs` are the pairs of KV cache types that its GPU code would be compiled for. `is_arm` is True for an
        image for Arm.
        """
        return facts

    def why_unasked(self, image: ImageFacts, gpus: GpuProbe) -> str | None:
        """Return why the engine cannot be run on this machine, if the image is not at fault; else None."""
        return None

    def query_devices(
        self, install: Install, hardware: Hardware, *, cpu_variant: str | None = None, may_recall: bool = False
    ) -> Devices:
        """Return the GPUs that the engine itself sees. With `may_recall`, a good answer of an earlier start is
        reused."""
        return Devices()

    def ruled_out(self, cache_dir: Path, image: ImageFacts, cpu: Cpu) -> RuledOut:
        """Return what earlier starts found out about the kernels on this CPU. Writes nothing."""
        return RuledOut()

    def choose_kernels(
        self, settings: Settings, facts: EngineFacts, cpu: Cpu, ruled_out: RuledOut | None = None
    ) -> Kernels:
        """Return the kernels to use on this CPU. Raises ConfigError (10) if the variant that was asked for cannot be
        used, CpuUnsupportedError (22) if no variant is left."""
        return Kernels(variant=None, isa=cpu.isa)

    def guard(self, install: Install, image: ImageFacts, cpu: Cpu, report: Report) -> Guard:
        return NoGuard()

    def loaded(self, plan: Plan, lines: Iterable[str], install: Install, *, is_trial: bool = False) -> None:
        """Keep facts from the log of a start that became ready; `examine` and `compilations` report them later from the
        volume. `is_trial`: the plan is only measured, not served. Raises nothing."""
        return

    def compilations(self, install: Install) -> Callable[[Plan], Compilation | None]:
        """Return a function from a plan to the compilation that its start does first, given the volume's present files.
        The function returns None for a plan that compiles nothing."""
        return lambda _: None

    def examine(self, install: Install, plan: Plan) -> Iterator[KernelResult]:
        """Return lines for `appliance doctor`: the engine's choices for this plan, and what earlier starts left on the
        volume. Starts no program."""
        return iter(())

    def check_kernels(self, install: Install, inputs: Inputs) -> Iterator[KernelResult]:
        """Check all kernels that this machine can run, for the tensor types of the model. Rules out those that fail."""
        return iter(())

    def space(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> Space:
        """Return the space of plans. Raises ModelDoesNotFitError (31) with figures if no plan fits, ConfigError (10) if
        the engine does not support a setting."""

    def shortage(self, error: FatalError, lines: Iterable[str]) -> Shortage | None:
        """Return the memory that was missing when the engine ended with this error and log while loading. None if the
        cause was not memory."""
        return None

    def refine(
        self, plans: Sequence[Plan], install: Install, *, budget_s: float, is_wanted: Callable[[], bool]
    ) -> Sequence[Plan]:
        """Return `plans` in the same order, with the memory that the engine's own loader reports, without plans that do
        not fit by these figures. Blocks for at most `budget_s`, and ends early once `is_wanted` returns False. It may
        be called from any thread."""
        return plans

    def command(self, plan: Plan, install: Install, socket_path: Path) -> Command: ...

    def keep_prompts(self, command: Command, install: Install, folder: PromptFolder) -> Command:
        """Return the command of an engine that keeps its prompts in a folder; unchanged if the engine cannot."""
        return command

    def keep_experts(self, command: Command, install: Install, files: ExpertFiles) -> Command:
        """Return the command of an engine that keeps and records the uses of experts in these files; unchanged if the
        engine or the plan has nothing to keep."""
        return command

    def client(self, command: Command, *, doing: str = "measuring") -> AbstractAsyncContextManager[Client]:
        """Return a client of the engine that `command` started. Error messages name the purpose `doing`."""

    def likely_client(self, command: Command, *, doing: str) -> AbstractAsyncContextManager[LikelyClient]:
        """Return a client as `client` does, for plans that `Space.exact` compares."""
        raise ValueError(_NOT_OFFERED)

    def text_reader(self, plan: Plan, install: Install, chunk_spec: ChunkSpec, text: Path) -> TextReader:
        """Return a reader for checking one of the KV cache types that `Space.kinds_to_check` names."""
        raise ValueError(_NOT_OFFERED)

    def quantizes(self, install: Install) -> bool:
        """True if the image has a program that quantizes a model file."""
        return False

    def quantizer(
        self, install: Install, origin: Path, target: Path, kind: str, *, threads: int, cpu_variant: str | None
    ) -> Quantizer:
        """Return the run that writes `target`, the quantized form of `origin`. Only if `quantizes` is True."""
        raise ValueError(_NOT_OFFERED)

    def is_worth_showing(self, line: str) -> bool:
        """True if this line of the engine's log is repeated in the appliance's log."""

    def step(self, line: str) -> LoadStep | None:
        """Return the progress of a load that this log line reports, or None; most lines report none."""
        return None

    def allocated(self, lines: Iterable[str]) -> Allocated:
        """Return what the engine allocated, from the log of one start up to readiness."""

    async def confirm_allocated(
        self, plan: Plan, allocated: Allocated, socket_path: Path
    ) -> tuple[Allocated, tuple[str, ...]]:
        """Return the log's figures, corrected by those of the running server, and a sentence for each disagreement
        between log, server and plan. Raises nothing."""
        return allocated, ()

    async def has_peaked(self, plan: Plan, socket_path: Path) -> bool:
        """True if the server has already done the work that takes most GPU memory. False if it does not tell. Raises
        nothing."""
        return False

    def as_error(self, ending: Ending, *, served: bool = False) -> FatalError:
        """Return the error of DESIGN.md section 6 for this ending. `served` is True if the engine was serving."""


def load(name: str, *, said_by: str = "") -> Engine:
    """Return the engine with this name. Raises ConfigError (10) if it cannot be served. `said_by` replaces the name in
    the message: the source that named the engine."""
    if name not in (served := _folders_with("engine.py")):
        message = f"the engine of this image cannot be served yet: {said_by or name}"
        raise ConfigError(message, hint=f"use an image of {', '.join(served)}: python -m images select")
    found: Any = import_module(f"appliance.engines.{name}.engine")
    engine: Engine = found.ENGINE
    return engine


def read_facts(binary: Path, kv_pairs: str) -> EngineFacts:
    """Return the facts of the engine whose program this is, while an image is built. Raises ConfigError (10) if no
    engine has a program of this name."""
    known = _folders_with("process/facts.py")
    for name in known:
        facts: Any = import_module(f"appliance.engines.{name}.process.facts")
        if binary.name == facts.BINARY:
            found: EngineFacts = facts.read_facts(binary, kv_pairs)
            return found
    message = f"no engine has a program of this name: {binary}"
    raise ConfigError(message, hint=f"--bin is the server of one of {', '.join(known)}")


def _folders_with(module: str) -> list[str]:
    """Return the engines that have this file. Every folder of the package's path is searched, since an engine may be
    installed elsewhere."""
    found = ((folder, path) for folder in engines.__path__ for path in Path(folder).glob(f"*/{module}"))
    return sorted(path.relative_to(folder).parts[0] for folder, path in found)
