"""Client of llama-server's own completion API, through its socket. Each reply has the timings of the engine's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from appliance.engines.engine import Completion
from appliance.engines.json_socket import JsonSocket
from appliance.errors import EngineNotReadyError


class LlamaClient(JsonSocket):
    """See `appliance.engines.engine.Client`."""

    async def tokenize(self, text: str, *, as_chat: bool = False) -> list[int]:
        body: dict[str, Any] = {"content": text}
        if as_chat:
            message = {"role": "user", "content": text}
            whole = await self.post("/apply-template", {"messages": [message]})
            body = {"content": whole["prompt"], "add_special": True, "parse_special": True}
        return list((await self.post("/tokenize", body)).get("tokens") or ())

    async def complete(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        uses_cache: bool = True,
        slot: int | None = None,
        seed: int | None = None,
    ) -> Completion:
        body = {"prompt": list(prompt), "n_predict": tokens, "cache_prompt": uses_cache, "return_tokens": True}
        body |= {"ignore_eos": True, "temperature": 0} if seed is None else {"seed": seed}
        body |= {} if slot is None else {"id_slot": slot}
        return parse_completion(await self.post("/completion", body))


def parse_completion(reply: dict[str, Any]) -> Completion:
    """Return the completion with the engine's own `timings`; missing ones are 0.

    Raises EngineNotReadyError if a timing is not a number.
    """
    timings = reply.get("timings") or {}
    try:
        return _completion(reply, timings)
    except (AttributeError, TypeError, ValueError) as error:
        message = f"engine gave no timings: {timings!r:.200}"
        raise EngineNotReadyError(message) from error


def _completion(reply: dict[str, Any], timings: dict[str, Any]) -> Completion:
    return Completion(
        read=int(timings.get("prompt_n", 0)),
        cached=int(timings.get("cache_n", 0)),
        made=int(timings.get("predicted_n", 0)),
        tokens=tuple(reply.get("tokens") or ()),
        prefill_ms=float(timings.get("prompt_ms", 0.0)),
        decode_ms=float(timings.get("predicted_ms", 0.0)),
        drafted=int(timings.get("draft_n", 0)),
        accepted=int(timings.get("draft_n_accepted", 0)),
        slot=reply.get("id_slot"),
    )
