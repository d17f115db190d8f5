"""The doors of an engine: all that the rest of the appliance asks of it. `load` is the only way in.

An engine is a folder beside this file with a module `engine.py`, whose ENGINE answers to `Engine`.
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
from appliance.engine_route import EngineRoute, ErrorRule, LoadGauges
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
    """This host among those that serve one model together, for one start of all of them."""

    nodes: int
    rank: int  # 0 leads
    address: str  # of this host, for the others
    leader: str  # of the host that leads
    port: int  # there, free for the engine
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # what the engine's network may be told
    is_ready: Readiness | None = None  # of a follower, which nobody can ask: whether all of them answer


@dataclass(frozen=True, kw_only=True)
class Host:
    """Another host of the group as it describes itself."""

    name: str
    gpus: tuple[Gpu, ...]  # that it may use, in the order of its ranks
    shm_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class Install:
    """Where the engine is, and what every program of it is started with. Made once; `node` anew for each start of a
    group."""

    engine_dir: Path
    facts: EngineFacts
    cache_dir: Path  # of this build, on the volume
    driver_dir: Path | None = None  # of the GPU's driver, where the dynamic loader does not look
    stall_timeout_s: float = 120.0
    oom_kills: Callable[[], int | None] | None = None
    node: Node | None = None  # None: it serves alone


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What plans are made from. Made once; only the kernels may change, when a variant is ruled out, and the other
    hosts, when they have joined."""

    settings: Settings
    image: ImageFacts
    facts: EngineFacts
    hardware: Hardware
    model: Model
    kernels: Kernels
    draft: Model | None = None  # of speculative decoding
    hosts: tuple[Host, ...] = ()  # that serve with this one, by rank; empty before they joined: taken to be alike
    dram_gb_s_max: float = math.inf  # of host memory that was not measured no more is assumed
    host_mib_max: float = math.inf  # of host memory that plans may use: more was seen to be killed
    memory_peaks: tuple[MemoryPeak, ...] = ()  # of GPUs, seen while earlier starts served

    @property
    def draft_path(self) -> str | None:
        return str(self.draft.path) if self.draft else None

    def with_kernels(self, kernels: Kernels) -> Inputs:
        return replace(self, kernels=kernels)


@dataclass(frozen=True, kw_only=True)
class Devices:
    """`names` as the engine numbers them. `said` is its last word on why there is none."""

    names: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class KernelResult:
    """One set of kernels that was checked. Right where there is neither `problem` nor `error`."""

    name: str
    words: str = ""
    problem: str = ""  # why it was not checked
    error: FatalError | None = None  # what is wrong with it
    hint: str = ""  # for the problem


@dataclass(frozen=True, kw_only=True)
class ChunkSpec:
    """How much text is read: pieces of the same number of tokens, each from an empty cache."""

    chunk_tokens: int
    chunks: int

    @property
    def scored_in_chunk(self) -> int:
        """The first half of a piece only fills the cache, and its last token has no next."""
        return self.chunk_tokens - self.chunk_tokens // 2 - 1

    @property
    def read(self) -> int:
        return self.chunk_tokens * self.chunks


@dataclass(frozen=True, kw_only=True)
class LoadStep:
    """How far an engine is that loads, by one line of its log. `facts` go into the document of the phase."""

    stage: str
    words: str
    facts: Mapping[str, str]


class Ending(Protocol):
    """What a supervisor tells of a program that ended."""

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
    """Every plan for one set of inputs. What has a body here an engine need not have."""

    @property
    def best(self) -> Plan:
        """The best that is predicted, without speculative decoding."""

    @property
    def predicted(self) -> Plan:
        """What is served where nothing was measured. Raises ModelDoesNotFitError (31)."""
        return self.best

    @property
    def native(self) -> int:
        """The model's own context length, or the one that was asked for."""

    def all(self) -> list[Plan]:
        """Every plan that fits, the best first."""

    def at_context(self, plan: Plan, context: int) -> Plan | None:
        """The plan with another context length; None where it does not fit."""

    def now(self, measured: Plan, allocated: Allocated | None = None) -> Plan | str:
        """A plan of an earlier start in the memory that is free now, or what it lacks, in words. `allocated` is what
        the engine then had."""

    def offers(self) -> tuple[Offer, ...]:
        """Kinds of speculative decoding that model and engine can do, the likeliest first. Raises ConfigError (10) for
        one that was asked for and cannot be done."""
        return ()

    def speculation(self, plan: Plan, kind: Kind, tokens: int) -> Speculation:
        """Of a kind that is offered: what it adds to the plan."""
        raise ValueError(_NOT_OFFERED)

    def speculating(self, plan: Plan, speculation: Speculation, choice: Choice | None = None) -> Plan:
        """Raises ModelDoesNotFitError (31) where there is no room."""
        raise ValueError(_NOT_OFFERED)

    def speculating_as(self, plan: Plan, measured: Plan) -> Plan:
        """As a plan that was measured, where that still holds."""
        return plan

    def costs(self, plan: Plan) -> Costs:
        """For the predictor."""

    @property
    def knob_effects(self) -> Mapping[str, KnobEffect]:
        """For the predictor: by knob of `Plan.knobs`, what it does beyond the costs."""
        return {}

    def kv_tokens(self, plan: Plan) -> int | None:
        """That all requests together may have in its KV cache, to compare with `Allocated`. None: not predicted."""
        return None

    def kv_mib(self, plan: Plan, tokens: int) -> tuple[float, ...]:
        """That a KV cache of so many tokens takes of each GPU of the plan. Empty: no plan counts on what was seen of an
        engine's memory while it served, and nobody need look."""
        return ()

    def needs(self, plan: Plan) -> tuple[tuple[str, float, float], ...]:
        """Places with the MiB that the plan needs there, and those that it may take."""
        return ()

    def after(self, plan: Plan, shortage: Shortage) -> Reduced | None:
        """With as much less room as the engine lacked when it loaded the plan. None where the plan takes nothing in
        that place."""
        return None

    def kinds_to_check(self) -> tuple[str, ...]:
        """KV cache types that would carry a much longer context, if they were shown to be harmless."""
        return ()

    def modelled(self, plan: Plan) -> str | None:
        """A line for `--explain` on what was not built yet, or None."""
        return None


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The space of plans after an engine ran out of memory in one place, `where`. `taken_mib` is of a plan, there."""

    space: Space
    missing_mib: float
    where: str
    taken_mib: Callable[[Plan], float]

    def is_smaller(self, after: Plan, before: Plan) -> bool:
        """Whether it takes less there. Only then another attempt is worth a load."""
        return self.taken_mib(after) < self.taken_mib(before)


class Guard(Protocol):
    """The check of an engine's kernels before they serve on this machine for the first time."""

    @property
    def is_checking(self) -> bool: ...

    @property
    def known(self) -> RuledOut:
        """What is ruled out, and what was checked, by now."""

    def begin(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> None:
        """Starts the check unless a start before did it. Inside the running loop."""

    async def finish(self) -> tuple[str, str] | None:
        """The variant that failed, and what was seen of it; None where nothing is wrong."""

    def rule_out(self, variant: str, seen: str) -> RuledOut:
        """For this and later starts. All that is ruled out."""

    def give_up(self) -> None: ...


class NoGuard:
    """Of an engine whose kernels need no check."""

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
    """What an engine did for one prompt, by its own clock. The first of the tokens comes out of the prompt's reading:
    `made` tokens are `made - 1` steps."""

    read: int  # tokens of the prompt
    cached: int  # tokens of it that were there already
    made: int
    tokens: tuple[int, ...]  # that were made
    prefill_ms: float  # of those that were read
    decode_ms: float
    drafted: int = 0  # draft tokens
    accepted: int = 0
    slot: int | None = None  # where the prompt is kept, where an engine has such places


class Client(Protocol):
    """Asks one engine that is up. EngineNotReadyError (43) when it refuses or breaks off."""

    async def tokenize(self, text: str, *, as_chat: bool = False) -> list[int]:
        """With `as_chat` as the model's template puts a user's message."""

    async def complete(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        uses_cache: bool = True,
        slot: int | None = None,
        seed: int | None = None,
    ) -> Completion:
        """Greedy and exactly `tokens` long; with a seed sampled as the model wants it, and it may end before. What is
        cached of the prompt is not read again with `uses_cache`. Without a slot the engine chooses."""


class TextReader(Protocol):
    """One run of a program that says how well the model predicts a text, chunk by chunk. Its log is fed to `add`."""

    @property
    def name(self) -> str:
        """Of the program."""

    @property
    def command(self) -> Command: ...

    @property
    def chunks(self) -> int | None:
        """That it said it would read; None until then."""

    @property
    def rows(self) -> int:
        """Pieces that were read so far."""

    @property
    def nll(self) -> tuple[float, ...]:
        """Nats for each scored token, the mean of each piece."""

    def add(self, line: str) -> None: ...

    def as_error(self, ending: Ending) -> FatalError: ...


class Engine(Protocol):
    """One engine. Methods that only read have no state; none keeps anything between calls but on the volume. What has a
    body here an engine need not have."""

    @property
    def name(self) -> str:
        """As in the image's facts."""

    @property
    def binary(self) -> str:
        """File name of the program that serves."""

    @property
    def model_format(self) -> Format:
        """Of the models that it serves."""

    @property
    def settings(self) -> frozenset[str]:
        """Of `ENGINE_SETTINGS`, those that it does something with; and `nodes` where it can serve on several hosts."""

    @property
    def launch(self) -> type[Launch]:
        """Of its plans."""

    @property
    def routes(self) -> tuple[EngineRoute, ...]: ...

    @property
    def errors(self) -> tuple[ErrorRule, ...]:
        """Which of its own errors clients are told in our words."""
        return ()

    @property
    def checks_model_name(self) -> bool:
        """True if it refuses requests that name the model otherwise than its plan does."""
        return False

    @property
    def dropped_headers(self) -> frozenset[bytes]:
        """Of a request, lower case: what the engine must not see."""
        return frozenset()

    @property
    def load_gauges(self) -> LoadGauges:
        """Under which names its load is told."""
        return LoadGauges()

    @property
    def kv_use_path(self) -> str | None:
        """Of the engine's own server: what tells of its KV cache."""
        return None

    def parse_kv_use(self, answer: bytes, plan: Plan) -> float:
        """From its answer there: the share, 0 to 1, that running requests take. Raises ValueError."""
        raise ValueError(_NOT_OFFERED)

    def query_facts(self, binary: Path, *, cpu_variant: str | None = None) -> EngineFacts:
        """Runs it. Raises EngineLibraryError (44) or EngineArgumentsError (40), and OSError where it is not there."""

    def query_installed(self, install: Install, *, cpu_variant: str | None = None) -> EngineFacts:
        """What it says on this machine. Raises likewise."""
        return self.query_facts(install.engine_dir / self.binary, cpu_variant=cpu_variant)

    def facts_in_cell(
        self, facts: EngineFacts, image: ImageFacts, *, kv_pairs: tuple[tuple[str, str], ...], is_arm: bool
    ) -> EngineFacts:
        """Return what the engine of an image would say that was not built, from the facts of one with the same engine.

        `kv_pairs` are those that its GPU code would be compiled for; `is_arm` if it is for Arm.
        """
        return facts

    def why_unasked(self, image: ImageFacts, gpus: GpuProbe) -> str | None:
        """Why it cannot be asked on this machine, where that is no fault of the image."""
        return None

    def query_devices(
        self, install: Install, hardware: Hardware, *, cpu_variant: str | None = None, may_recall: bool = False
    ) -> Devices:
        """GPUs that the engine itself sees. With `may_recall` a good answer of an earlier start is believed."""
        return Devices()

    def ruled_out(self, cache_dir: Path, image: ImageFacts, cpu: Cpu) -> RuledOut:
        """What earlier starts saw of the kernels on this CPU. Writes nothing."""
        return RuledOut()

    def choose_kernels(
        self, settings: Settings, facts: EngineFacts, cpu: Cpu, ruled_out: RuledOut | None = None
    ) -> Kernels:
        """Raises ConfigError (10) for a variant that cannot be used, CpuUnsupportedError (22) where none is left."""
        return Kernels(variant=None, isa=cpu.isa)

    def guard(self, install: Install, image: ImageFacts, cpu: Cpu, report: Report) -> Guard:
        return NoGuard()

    def loaded(self, plan: Plan, lines: Iterable[str], install: Install, *, is_trial: bool = False) -> None:
        """The plan serves, or is measured as a trial, and this is the log of its start: keeps on the volume what
        `examine` and `compilations` tell later. Raises nothing."""
        return

    def compilations(self, install: Install) -> Callable[[Plan], Compilation | None]:
        """What the start of a plan has compiled first, by what is on the volume now. None: nothing."""
        return lambda _: None

    def examine(self, install: Install, plan: Plan) -> Iterator[KernelResult]:
        """For `appliance doctor`: what this engine does on this machine with the plan, and what earlier starts left.
        Starts nothing."""
        return iter(())

    def check_kernels(self, install: Install, inputs: Inputs) -> Iterator[KernelResult]:
        """All that this machine can run, for the model's types. What fails is ruled out."""
        return iter(())

    def space(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> Space:
        """Raises ModelDoesNotFitError (31) with figures, ConfigError (10) for a setting that the engine cannot take."""

    def shortage(self, error: FatalError, lines: Iterable[str]) -> Shortage | None:
        """What it lacked that ended with this error and log while it loaded. None where they do not tell of memory."""
        return None

    def refine(
        self, plans: Sequence[Plan], install: Install, *, budget_s: float, is_wanted: Callable[[], bool]
    ) -> Sequence[Plan]:
        """In their order, with what the engine's own loader says that they need, without those that do not fit by it.
        Blocks for `budget_s` at most, and ends once `is_wanted` says no, from whichever thread."""
        return plans

    def command(self, plan: Plan, install: Install, socket_path: Path) -> Command: ...

    def client(self, command: Command, *, doing: str = "measuring") -> AbstractAsyncContextManager[Client]:
        """For an engine that `command` started; `doing` says in errors what it was for."""

    def text_reader(self, plan: Plan, install: Install, chunk_spec: ChunkSpec, text: Path) -> TextReader:
        """For the check of KV cache types that `Space.kinds_to_check` names."""
        raise ValueError(_NOT_OFFERED)

    def is_worth_showing(self, line: str) -> bool:
        """Whether a line of its log belongs into ours."""

    def step(self, line: str) -> LoadStep | None:
        """What a line of its log says of how far it is as it loads. None for most."""
        return None

    def allocated(self, lines: Iterable[str]) -> Allocated:
        """From the log of one start, up to readiness."""

    async def confirm_allocated(
        self, plan: Plan, allocated: Allocated, socket_path: Path
    ) -> tuple[Allocated, tuple[str, ...]]:
        """What the log told, with what the server that is up tells of it; and where both, or the plan, do not agree, in
        words. Raises nothing."""
        return allocated, ()

    async def has_peaked(self, plan: Plan, socket_path: Path) -> bool:
        """Whether the server has done the work that takes most memory of a GPU. False where it does not tell. Raises
        nothing."""
        return False

    def as_error(self, ending: Ending, *, served: bool = False) -> FatalError:
        """What it ended with, as one of the errors of DESIGN.md section 6."""


def load(name: str, *, said_by: str = "") -> Engine:
    """The engine of that name. Raises ConfigError (10) for one that cannot be served."""
    if name not in (served := _folders_with("engine.py")):
        message = f"the engine of this image cannot be served yet: {said_by or name}"
        raise ConfigError(message, hint=f"use an image of {', '.join(served)}: python -m images select")
    found: Any = import_module(f"appliance.engines.{name}.engine")
    engine: Engine = found.ENGINE
    return engine


def read_facts(binary: Path, kv_pairs: str) -> EngineFacts:
    """Of the engine whose program this is, while an image is built. Raises ConfigError (10) for an unknown one."""
    known = _folders_with("process/facts.py")
    for name in known:
        facts: Any = import_module(f"appliance.engines.{name}.process.facts")
        if binary.name == facts.BINARY:
            found: EngineFacts = facts.read_facts(binary, kv_pairs)
            return found
    message = f"no engine has a program of this name: {binary}"
    raise ConfigError(message, hint=f"--bin is the server of one of {', '.join(known)}")


def _folders_with(module: str) -> list[str]:
    """Return the engines with this file, in every folder of the package's path: one may be installed elsewhere."""
    found = ((folder, path) for folder in engines.__path__ for path in Path(folder).glob(f"*/{module}"))
    return sorted(path.relative_to(folder).parts[0] for folder, path in found)
