"""An engine that is unlike llama.cpp in everything that it may choose: program, flags, log, API, knobs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from appliance.command import Command
from appliance.engine_route import EngineRoute
from appliance.engines.engine import Completion, Ending, Engine, Inputs, Install, Space
from appliance.errors import EngineDiedError, EngineNotReadyError, FatalError, ModelDoesNotFitError
from appliance.image_facts import EngineFacts
from appliance.plan import NOTHING, Allocated, Choice, Costs, KnobEffect, KvCheck, Launch, Plan
from appliance.values import dataclass

LANES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class ToyLaunch(Launch):
    lanes: int

    @property
    def knobs(self) -> tuple[tuple[str, int | str], ...]:
        return (("lanes", self.lanes),)


class ToySpace(Space):
    knob_effects = {"lanes": KnobEffect(prior=0.5, is_of_doubling=True)}  # noqa: RUF012 - a property of the protocol

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    @property
    def native(self) -> int:
        return self._inputs.settings.ctx_size or self._inputs.model.native_context

    @property
    def best(self) -> Plan:
        settings, path = self._inputs.settings, self._inputs.model.path
        usable_mib, size_mib = self._inputs.hardware.memory.usable_mib, path.stat().st_size / 2**20
        if size_mib > usable_mib:
            message = f"model does not fit: {path.name} needs {size_mib:,.0f} MiB"
            raise ModelDoesNotFitError(message)
        return Plan(
            engine="toy",
            model_path=str(path),
            alias=settings.alias or "toy",
            context=self.native,
            kv_type="f16",
            parallel=1,
            is_embedding=False,
            memory=replace(NOTHING, weights=size_mib),
            usable_mib=usable_mib,
            launch=ToyLaunch(lanes=1),
            choices=(Choice(name="lanes", value="1", reason="the first to try", source="default"),),
        )

    def all(self) -> list[Plan]:
        return [replace(self.best, launch=ToyLaunch(lanes=lanes)) for lanes in LANES]

    def at_context(self, plan: Plan, context: int) -> Plan | None:
        return replace(plan, context=context)

    def now(self, measured: Plan, allocated: Allocated | None = None) -> Plan | str:
        return replace(measured, model_path=self.best.model_path, usable_mib=self.best.usable_mib)

    def costs(self, plan: Plan) -> Costs:
        return Costs(cpu_ms=8.0, cpu_prefill_ms=0.5)


class ToyClient:
    def __init__(self, command: Command) -> None:
        self._path = str(command.socket_path)

    async def tokenize(self, text: str, *, as_chat: bool = False) -> list[int]:
        return list((await ask(self._path, "/toy/words", {"text": f"user says {text}" if as_chat else text}))["words"])

    async def complete(
        self, prompt: Sequence[int], tokens: int, *, uses_cache: bool = True, slot: int | None = None,
        seed: int | None = None,
    ) -> Completion:  # fmt: skip
        reply = await ask(self._path, "/toy/go", {"words": list(prompt), "more": tokens, "keep": uses_cache})
        return Completion(
            read=reply["read"], cached=reply["kept"], made=tokens, tokens=tuple(reply["made"]),
            prefill_ms=reply["reading_us"] / 1000, decode_ms=reply["making_us"] / 1000,
        )  # fmt: skip


async def ask(socket_path: str, path: str, body: Any) -> Any:
    data = json.dumps(body).encode()
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path)
        writer.write(b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(data), data))
        reply = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
    except (OSError, ValueError) as error:
        message = f"toy broke off {path}: {error}"
        raise EngineNotReadyError(message) from error
    return reply


class Toy(Engine):
    name, binary, launch, model_format = "toy", "toyd", ToyLaunch, "gguf"
    settings = frozenset({"devices"})

    def query_facts(self, binary: Path, *, cpu_variant: str | None = None) -> EngineFacts:
        return EngineFacts(version="1", build=1, commit="toy", flags=(), kv_types=("f16",))

    routes = (EngineRoute(path="/v1/chat/completions", upstream="/toy/chat", can_stream=False),)

    def space(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> ToySpace:
        return ToySpace(inputs)

    def command(self, plan: Plan, install: Install, socket_path: Path) -> Command:
        assert isinstance(plan.launch, ToyLaunch)
        argv = (install.engine_dir / self.binary, f"lanes={plan.launch.lanes}", plan.model_path, socket_path)
        return Command(argv=tuple(map(str, argv)), environment={"PATH": "/usr/bin:/bin"}, socket_path=socket_path,
                       is_ready=partial(is_ready, str(socket_path)), is_error=self.is_error)  # fmt: skip

    @asynccontextmanager
    async def client(self, command: Command, *, doing: str = "measuring") -> AsyncIterator[ToyClient]:
        yield ToyClient(command)

    def is_error(self, line: str) -> bool:
        return "OUCH" in line

    is_worth_showing = is_error

    def allocated(self, lines: Iterable[str]) -> Allocated:
        held = (found for line in lines if (found := re.search(r"holding (\d+) bytes", line)))
        return Allocated(model=next((int(found[1]) / 2**20 for found in held), 0.0))

    def as_error(self, ending: Ending, *, served: bool = False) -> FatalError:
        kind = EngineDiedError if served else EngineNotReadyError
        return kind(f"toyd {ending.describe()}: {ending.first_error or 'no word'}", log=ending.log)


async def is_ready(socket_path: str) -> bool:
    try:
        return bool((await ask(socket_path, "/toy/go", {"words": [1], "more": 1, "keep": False}))["made"])
    except EngineNotReadyError:
        return False


ENGINE = Toy()
