"""llama.cpp as an engine: the methods that the rest of the appliance calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from appliance.command import Command
from appliance.console.report import Report
from appliance.engine_route import EngineRoute, ErrorRule
from appliance.engines.engine import (
    ChunkSpec,
    Client,
    Devices,
    Ending,
    Engine,
    ExpertFiles,
    Guard,
    Inputs,
    Install,
    KernelResult,
    PromptFolder,
    Quantizer,
    TextReader,
)
from appliance.engines.llama.api.client_errors import ERRORS
from appliance.engines.llama.api.routes import (
    DROPPED_HEADERS,
    METRICS_PATH,
    ROUTES,
    SLOTS_PATH,
    parse_counts,
    parse_kv_use,
)
from appliance.engines.llama.kernels.kernel_record import KernelStore
from appliance.engines.llama.planning.arguments.launch import LlamaLaunch
from appliance.engines.llama.planning.arguments.loader_check import refine
from appliance.engines.llama.planning.hardware.cpu_variant import choose_kernels
from appliance.engines.llama.planning.hardware.observed_limits import Limits
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process import endings, experts, prompt_disk, quantize, server
from appliance.engines.llama.process.devices import query_devices, query_devices_once
from appliance.engines.llama.process.facts import BINARY, facts_in_cell, query_facts
from appliance.engines.metric_aliases import METRIC_ALIASES
from appliance.errors import FatalError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Format
from appliance.plan import Allocated, Kernels, KvCheck, Launch, Plan, RuledOut, Shortage
from appliance.probe import Cpu, Hardware
from appliance.settings import ENGINE_SETTINGS, Settings


class Llama(Engine):
    """See `appliance.engines.engine.Engine`."""

    name = "llama"
    binary = BINARY
    model_format: Format = "gguf"
    settings = ENGINE_SETTINGS
    launch: type[Launch] = LlamaLaunch
    routes: tuple[EngineRoute, ...] = ROUTES
    errors: tuple[ErrorRule, ...] = ERRORS
    dropped_headers = DROPPED_HEADERS
    metric_aliases = METRIC_ALIASES
    kv_use_path = SLOTS_PATH
    counts_path = METRICS_PATH

    def parse_kv_use(self, answer: bytes, plan: Plan) -> float:
        return parse_kv_use(answer, plan.context)

    def parse_counts(self, answer: bytes) -> Mapping[str, float]:
        return parse_counts(answer)

    def query_facts(self, binary: Path, *, cpu_variant: str | None = None) -> EngineFacts:
        return query_facts(binary, server.variant_environment(cpu_variant))

    def facts_in_cell(
        self, facts: EngineFacts, image: ImageFacts, *, kv_pairs: tuple[tuple[str, str], ...], is_arm: bool
    ) -> EngineFacts:
        return facts_in_cell(facts, image, kv_pairs=kv_pairs, is_arm=is_arm)

    def query_devices(
        self, install: Install, hardware: Hardware, *, cpu_variant: str | None = None, may_recall: bool = False
    ) -> Devices:
        ask = query_devices
        if may_recall:
            uuids = tuple(gpu.uuid or "" for gpu in hardware.gpus.gpus)
            ask = partial(query_devices_once, driver=hardware.gpus.driver, uuids=uuids)
        return ask(install.engine_dir, install.cache_dir, driver_dir=install.driver_dir, cpu_variant=cpu_variant)

    def ruled_out(self, cache_dir: Path, image: ImageFacts, cpu: Cpu) -> RuledOut:
        store = KernelStore(cache_dir, image.build_id, cpu)
        return store.ruled_out(store.load(may_set_aside=False))

    def choose_kernels(
        self, settings: Settings, facts: EngineFacts, cpu: Cpu, ruled_out: RuledOut | None = None
    ) -> Kernels:
        return choose_kernels(settings, facts, cpu, ruled_out)

    def guard(self, install: Install, image: ImageFacts, cpu: Cpu, report: Report) -> Guard:
        from appliance.engines.llama.kernels.kernel_guard import (
            KernelGuard,  # here: it costs 20 ms, and `plan` has no event loop
        )

        store = KernelStore(install.cache_dir, image.build_id, cpu, partial(report.warning, "kernels_unknown"))
        return KernelGuard(store, report, install, threads=cpu.cores)

    def check_kernels(self, install: Install, inputs: Inputs) -> Iterator[KernelResult]:
        from appliance.engines.llama.kernels.kernel_checks import check_kernels  # here: no start needs it

        return check_kernels(install, inputs)

    def space(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> Space:
        facts = (inputs.image, inputs.facts, inputs.hardware, inputs.model)
        limits = Limits(host_mib=inputs.host_mib_max, dram_gb_s=inputs.dram_gb_s_max)
        kernels, draft = inputs.kernels, inputs.draft
        return Space(inputs.settings, *facts, kv_checks=kv_checks, kernels=kernels, draft=draft, limits=limits)

    def shortage(self, error: FatalError, lines: Iterable[str]) -> Shortage | None:
        return endings.shortage_of(error, lines)

    def refine(
        self, plans: Sequence[Plan], install: Install, *, budget_s: float, is_wanted: Callable[[], bool]
    ) -> Sequence[Plan]:
        from appliance.engines.llama.process.fit import query_projections  # here: a start from a profile never needs it

        found = query_projections(plans, install, budget_s=budget_s, is_wanted=is_wanted)
        return refine(plans, found)

    def command(self, plan: Plan, install: Install, socket_path: Path) -> Command:
        return server.command(plan, install, socket_path)

    def keep_prompts(self, command: Command, install: Install, folder: PromptFolder) -> Command:
        return prompt_disk.keep_prompts(command, install.facts, folder)

    def keep_experts(self, command: Command, install: Install, files: ExpertFiles) -> Command:
        return experts.keep_experts(command, install.facts, files)

    def client(self, command: Command, *, doing: str = "measuring") -> AbstractAsyncContextManager[Client]:
        from appliance.engines.llama.api.client import LlamaClient  # here: no start needs an HTTP library

        return LlamaClient(command, doing=doing)

    def text_reader(self, plan: Plan, install: Install, chunk_spec: ChunkSpec, text: Path) -> TextReader:
        from appliance.engines.llama.process.perplexity import Perplexity  # here: no start needs it

        return Perplexity(plan, install, chunk_spec, text)

    def quantizes(self, install: Install) -> bool:
        return (install.engine_dir / quantize.BINARY).is_file()

    def quantizer(
        self, install: Install, origin: Path, target: Path, kind: str, *, threads: int, cpu_variant: str | None
    ) -> Quantizer:
        return quantize.Quantize(install, origin, target, kind, threads=threads, cpu_variant=cpu_variant)

    def is_worth_showing(self, line: str) -> bool:
        return server.is_worth_showing(line)

    def allocated(self, lines: Iterable[str]) -> Allocated:
        return server.parse_allocated(lines)

    def as_error(self, ending: Ending, *, served: bool = False) -> FatalError:
        return endings.as_error(ending, served=served)


ENGINE = Llama()
