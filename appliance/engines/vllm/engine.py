"""vLLM behind the engine interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from appliance.command import Command
from appliance.engine_route import EngineRoute, ErrorRule
from appliance.engines.engine import (
    Client,
    Devices,
    Ending,
    Engine,
    Inputs,
    Install,
    KernelResult,
    LikelyClient,
    LoadStep,
)
from appliance.engines.gpu_work import gpu_work_of
from appliance.engines.metric_aliases import METRIC_ALIASES
from appliance.engines.vllm.api.client_errors import ERRORS
from appliance.engines.vllm.api.routes import METRICS_PATH, ROUTES, parse_kv_use
from appliance.engines.vllm.cache_config import confirmed, query_cache_config, query_metrics
from appliance.engines.vllm.load_observed import has_filled_a_step, query_work
from appliance.engines.vllm.planning.arguments.launch import VllmLaunch
from appliance.engines.vllm.planning.space import Space
from appliance.engines.vllm.process import endings, facts, log, server
from appliance.engines.vllm.startup import compiled, last_start, progress
from appliance.engines.vllm.startup.caches import Caches
from appliance.engines.vllm.startup.ready import health, one_token
from appliance.errors import FatalError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Format
from appliance.plan import Allocated, Compilation, KvCheck, Launch, Plan, Shortage
from appliance.probe import GpuProbe, Hardware

SETTINGS = frozenset({
    "chat_template_file", "devices", "draft_tokens", "engine_arg", "kv_type", "mmproj", "nodes", "parallel",
    "reserve_mib", "rope_scaling", "speculation", "thinking", "threads", "ubatch",
})  # fmt: skip


class Vllm(Engine):
    """See `appliance.engines.engine.Engine`."""

    name = "vllm"
    binary = f"bin/{facts.BINARY}"
    model_format: Format = "safetensors"
    settings = SETTINGS
    launch: type[Launch] = VllmLaunch
    routes: tuple[EngineRoute, ...] = ROUTES
    errors: tuple[ErrorRule, ...] = ERRORS
    metric_aliases = METRIC_ALIASES
    checks_model_name = True
    measures_in_service = True
    kv_use_path = METRICS_PATH

    def parse_kv_use(self, answer: bytes, plan: Plan) -> float:
        return parse_kv_use(answer)

    def query_facts(self, binary: Path, *, cpu_variant: str | None = None) -> EngineFacts:
        return facts.query_facts(binary)

    def query_installed(self, install: Install, *, cpu_variant: str | None = None) -> EngineFacts:
        driver = str(install.driver_dir) if install.driver_dir else None
        return facts.query_facts(install.engine_dir / self.binary, library_path=driver)

    def why_unasked(self, image: ImageFacts, gpus: GpuProbe) -> str | None:
        if image.cuda is None or gpus.libcuda is not None:
            return None
        return "its libraries need the GPU driver's libcuda.so.1, which cannot be found"

    def query_devices(
        self, install: Install, hardware: Hardware, *, cpu_variant: str | None = None, may_recall: bool = False
    ) -> Devices:
        """Return the GPUs that NVML and the driver's library report. vLLM itself is not asked, since it would import
        PyTorch, which takes seconds; a vLLM that sees no GPU ends with 23 anyway."""
        if hardware.gpus.libcuda is None:
            return Devices(said="the driver's library libcuda.so.1 cannot be found: cannot open shared object file")
        usable = [gpu for gpu in hardware.gpus.gpus if not gpu.problem]
        return Devices(names=tuple(f"cuda:{at}" for at in range(len(usable))))

    def space(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> Space:
        return Space(inputs)

    def shortage(self, error: FatalError, lines: Iterable[str]) -> Shortage | None:
        return endings.shortage_of(error, lines)

    def command(self, plan: Plan, install: Install, socket_path: Path) -> Command:
        is_ready = install.node.is_ready if install.node else None
        is_headless = is_ready is not None  # a follower of a group of hosts: it runs no API server
        is_ready = is_ready or one_token(socket_path, plan.alias, is_embedding=plan.is_embedding)
        found = server.command(plan, install, socket_path, is_ready=is_ready, is_error=log.is_error)
        return replace(
            found,
            is_waiting=log.is_waiting,
            is_fatal=log.is_fatal,
            is_at_work=gpu_work_of(share.gpu.id for share in server.own_shares(plan, install)),
            is_answering=None if is_headless else health(socket_path),
            work_done=None if is_headless else partial(query_work, socket_path),
            scratch=server.scratch_of(socket_path),
            upkeep=Caches(install.cache_dir, socket_path.stem),
        )

    def client(self, command: Command, *, doing: str = "measuring") -> AbstractAsyncContextManager[Client]:
        return self.likely_client(command, doing=doing)

    def likely_client(self, command: Command, *, doing: str) -> AbstractAsyncContextManager[LikelyClient]:
        from appliance.engines.vllm.api.client import VllmClient  # imported here, since starts need no HTTP library

        return VllmClient(command, doing=doing)

    def is_worth_showing(self, line: str) -> bool:
        return log.is_worth_showing(line)

    def step(self, line: str) -> LoadStep | None:
        return progress.step_of(line)

    def loaded(self, plan: Plan, lines: Iterable[str], install: Install, *, is_trial: bool = False) -> None:
        lines = tuple(lines)
        compiled.keep(plan, lines, install.cache_dir)
        if not is_trial:
            last_start.keep(plan, lines, install.cache_dir)

    def compilations(self, install: Install) -> Callable[[Plan], Compilation | None]:
        return compiled.compilations(install.cache_dir)

    def examine(self, install: Install, plan: Plan) -> Iterator[KernelResult]:
        from appliance.engines.vllm.examine import examine  # imported here, since no start needs it

        return examine(install, plan)

    def allocated(self, lines: Iterable[str]) -> Allocated:
        return progress.parse_allocated(lines)

    async def confirm_allocated(
        self, plan: Plan, allocated: Allocated, socket_path: Path
    ) -> tuple[Allocated, tuple[str, ...]]:
        return confirmed(plan, allocated, await query_cache_config(socket_path))

    async def has_peaked(self, plan: Plan, socket_path: Path) -> bool:
        return has_filled_a_step(await query_metrics(socket_path), plan)

    def as_error(self, ending: Ending, *, served: bool = False) -> FatalError:
        return endings.as_error(ending, served=served)


ENGINE = Vllm()
