"""A plan's own server, asked as users ask it: conversations of natural text, with what was read and what was cached."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from appliance.engines.engine import Install
from appliance.engines.llama.process.facts import query_facts
from appliance.engines.llama.process.server import command
from appliance.plan import Plan, with_launch
from appliance.supervisor import Supervisor
from appliance.tune.trials.run_trial import TEXT
from benchmarks.memory import planned_for
from tests.process.stages.engine import find_engine

WORDS = tuple(TEXT.read_text(encoding="utf-8").split())
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The cost of one request. `prompt` is the sum of tokens that were read and tokens that were cached."""

    cached: int
    read: int
    text: str

    @property
    def prompt(self) -> int:
        return self.cached + self.read


def words(count: int, *, begin: int = 0) -> str:
    """Return natural text of `count` words. Texts with different `begin` share no prefix."""
    return " ".join(WORDS[(begin + at) % len(WORDS)] for at in range(count))


@dataclass(kw_only=True)
class Talk:
    """One conversation: each turn sends all before it."""

    server: Served
    system: str = SYSTEM
    messages: list[dict[str, str]] = field(default_factory=list)

    async def say(self, text: str, *, tokens: int = 8) -> Turn:
        self.messages.append({"role": "user", "content": text})
        turn = await self.server.ask([{"role": "system", "content": self.system}, *self.messages], tokens=tokens)
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn


class Served:
    def __init__(self, plan: Plan, session: aiohttp.ClientSession) -> None:
        self.plan = plan
        self._session = session

    def talk(self, system: str = SYSTEM) -> Talk:
        return Talk(server=self, system=system)

    async def ask(self, messages: list[dict[str, str]], *, tokens: int = 8) -> Turn:
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0}
        reply = await self.post("/v1/chat/completions", {**body, "ignore_eos": True})
        timings = reply["timings"]
        text = reply["choices"][0]["message"]["content"] or ""
        return Turn(cached=timings["cache_n"], read=timings["prompt_n"], text=text)

    async def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        async with self._session.post(f"http://engine{route}", json=body) as reply:
            data: dict[str, Any] = await reply.json()
            if reply.status != 200:
                raise RefusedError(reply.status, str(data))
            return data


PATIENCE = aiohttp.ClientTimeout(total=3600)  # a long prompt on a machine that others use


class RefusedError(Exception):
    pass


@asynccontextmanager
async def serving(model: Path, *, change: Mapping[str, Any] | None = None, **settings: str) -> AsyncIterator[Served]:
    """Serve the first plan for this machine and these settings, with the product's own command line."""
    binary = find_engine("llama-server")
    facts = query_facts(binary)
    plan = planned_for(facts, model, {"ctx_size": "8192", "threads": "1", "cache_ram_mib": "256", **settings})
    plan = with_launch(plan, **(change or {}))
    folder = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))
    supervisor = Supervisor(on_line=lambda line: None)
    started = command(plan, Install(engine_dir=binary.parent, facts=facts, cache_dir=folder), folder / "e.sock")
    try:
        supervisor.start(started)
        crash = await supervisor.wait_ready()
        assert crash is None, crash.describe()
        connector = aiohttp.UnixConnector(path=str(started.socket_path))
        async with aiohttp.ClientSession(connector=connector, timeout=PATIENCE) as session:
            yield Served(plan, session)
    finally:
        await supervisor.stop()
        shutil.rmtree(folder)
