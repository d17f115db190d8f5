"""Client for completions of vLLM, through its socket: OpenAI's API with vLLM's additional fields.

Each answer contains the engine's own times (`--enable-per-request-metrics`) and the number of cached prompt tokens
(`--enable-prompt-tokens-details`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from appliance.command import Command
from appliance.engines.engine import Completion
from appliance.engines.json_socket import JsonSocket
from appliance.errors import EngineNotReadyError

_NAME_FLAG = "--served-model-name"
_THROWN_AWAY_TOKENS = 2

_log = logging.getLogger(__name__)


class VllmClient(JsonSocket):
    """Client of vLLM; implements `appliance.engines.engine.Client`.

    The first completion is sent twice and its first answer is thrown away: vLLM compiles kernels for the first request
    of a kind, which would falsify a measurement. `jit_ms` is the time to first token of the request that was thrown
    away.
    """

    def __init__(self, command: Command, *, doing: str) -> None:
        super().__init__(command, doing=doing)
        self._model = command.argv[command.argv.index(_NAME_FLAG) + 1]
        self.jit_ms: float | None = None
        # An engine that serves may hold this text in its cache, from an interrupted measurement.
        self._salt = secrets.token_hex(8)

    async def tokenize(self, text: str, *, as_chat: bool = False) -> list[int]:
        body: dict[str, Any] = {"model": self._model}
        body |= {"messages": [{"role": "user", "content": text}]} if as_chat else {"prompt": text}
        if not as_chat:
            body["add_special_tokens"] = False  # the text continues a prompt, so it gets no beginning-of-sequence token
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
        if self.jit_ms is None:
            # A salt of its own: the measured request must not find this one's tokens in the cache.
            thrown_away = self._body(prompt, min(tokens, _THROWN_AWAY_TOKENS), salt=secrets.token_hex(8), seed=None)
            self.jit_ms = parse_completion(await self.post("/v1/completions", thrown_away)).prefill_ms
            words = "the first request was thrown away: kernels are compiled for it (JIT); its first token took %.0f ms"
            _log.info(words, self.jit_ms)
        salt = self._salt if uses_cache else secrets.token_hex(8)
        return parse_completion(await self.post("/v1/completions", self._body(prompt, tokens, salt=salt, seed=seed)))

    async def likely(self, prompt: Sequence[int], count: int) -> Mapping[int, float]:
        body = self._body(prompt, 1, salt=self._salt, seed=None)
        body |= {"logprobs": count, "return_tokens_as_token_ids": True}  # else unlike tokens may have one text
        return parse_likely(await self.post("/v1/completions", body))

    def _body(self, prompt: Sequence[int], tokens: int, *, salt: str, seed: int | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        return body | ({"ignore_eos": True, "temperature": 0} if seed is None else {"seed": seed})


def parse_completion(reply: dict[str, Any]) -> Completion:
    """Read an answer. Raises EngineNotReadyError if it lacks the engine's times or a figure is not a number."""
    try:
        return _completion(reply)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        message = f"engine gave no timings: {reply!r:.200}"
        raise EngineNotReadyError(message) from error


def parse_likely(reply: dict[str, Any]) -> Mapping[int, float]:
    """Return the log probability of each token that the answer names in its first position.

    vLLM names the sampled token too, even if it is not among the most likely. Raises EngineNotReadyError (43).
    """
    try:
        likely = reply["choices"][0]["logprobs"]["top_logprobs"][0].items()
        (first, *others) = ((int(name.removeprefix("token_id:")), float(nats)) for name, nats in likely)
        return dict((first, *others))
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        message = f"engine gave no probabilities of tokens: {reply!r:.200}"
        raise EngineNotReadyError(message) from error


def _completion(reply: dict[str, Any]) -> Completion:
    usage, clock = reply["usage"], reply["metrics"]
    cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    drafts = clock.get("speculative_decoding") or {}
    return Completion(
        read=int(usage["prompt_tokens"]) - cached,
        cached=cached,
        made=int(usage["completion_tokens"]),
        tokens=tuple(reply["choices"][0].get("token_ids") or ()),
        prefill_ms=float(clock["time_to_first_token_ms"]),
        decode_ms=float(clock["generation_time_ms"]),
        drafted=int(drafts.get("num_draft_tokens", 0)),
        accepted=int(drafts.get("num_accepted_draft_tokens", 0)),
    )
