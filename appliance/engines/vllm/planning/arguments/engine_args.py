"""Arguments for vLLM from the setting engine_arg: taken into the plan, passed on unchanged, or refused. Pure."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from appliance.engines.vllm.planning.arguments.launch import EAGER, GRAPH_MODES, THINKING_FLAG
from appliance.errors import ConfigError
from appliance.image_facts import EngineFacts
from appliance.settings import SETTINGS, Settings, is_flag
from appliance.values import dataclass

# Flags that are refused since a setting of the appliance sets them, by the setting's name.
_SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "alias": ("--served-model-name",),
    "auth": ("--api-key",),
    "chat_template_file": ("--chat-template",),
    "ctx_size": ("--max-model-len",),
    "devices": ("--device-ids",),
    "draft_tokens": ("--spec-tokens",),
    "drain_s": ("--shutdown-timeout",),
    "host": ("--host", "--uds"),
    "kv_type": ("--kv-cache-dtype",),
    "leader": ("--master-addr",),
    "model": ("--model", "--tokenizer", "--revision", "--hf-token", "--download-dir"),
    "node_rank": ("--node-rank", "-r"),
    "nodes": ("--nnodes", "-n"),
    "parallel": ("--max-num-seqs",),
    "port": ("--port",),
    "speculation": ("--speculative-config", "-sc", "--spec-method", "--spec-model"),
    "ubatch": ("--max-num-batched-tokens",),
})  # fmt: skip
_REASONS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "one container serves one engine: several engines or hosts are for a cluster": (
        "--api-server-count", "-asc", "--master-port", "--headless",
    ),
    "the appliance itself watches the engine's processes": (
        "--distributed-executor-backend", "--enable-elastic-ep", "--enable-fault-tolerance", "--fault-tolerance-config",
    ),
    "the appliance reads the engine's log and metrics": (
        "--disable-log-stats", "--log-config-file", "--log-level", "--logging-config", "--uvicorn-log-level",
    ),
    "the command has it already, one way or the other": (
        "--disable-fastapi-docs", "--disable-uvicorn-access-log", "--enable-per-request-metrics",
        "--enable-prompt-tokens-details", "--generation-config", "--max-num-queued-reqs",
    ),
    "the appliance listens for clients, and speaks to the engine on a socket of its own": (
        "--ssl-keyfile", "--ssl-certfile", "--root-path", "--middleware", "--allowed-origins", "--enable-scale-out",
    ),
    "it says the same as --compilation-config, and one of them would win unseen": (
        "-O", "-O0", "-O1", "-O2", "-O3", "--optimization-level", "--cudagraph-capture-sizes",
        "--max-cudagraph-capture-size",
    ),
    "the plan is for a command line, and a file would change it unseen": ("--config",),
    "the engine would print it and end": ("-h", "--help", "-v", "--version"),
})  # fmt: skip
OWNED: Mapping[str, str] = MappingProxyType({flag: name for name, flags in _SETTINGS.items() for flag in flags})
UNOFFERED: Mapping[str, str] = MappingProxyType({flag: why for why, flags in _REASONS.items() for flag in flags})
_SHOWN = 12  # values of a flag in a hint
# Families of refused flags, by their beginning.
_FAMILIES: Mapping[str, str] = MappingProxyType({
    "--data-parallel": "one container serves one engine: several are for a cluster",
    "--dp-": "one container serves one engine: several are for a cluster",
    "-dp": "one container serves one engine: several are for a cluster",
    "--grpc": "the appliance speaks HTTP to the engine, on a socket of its own",
})  # fmt: skip
_LONG = {
    "-ac": "--attention-config", "-cc": "--compilation-config", "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel", "-pcp": "--prefill-context-parallel-size", "-pp": "--pipeline-parallel-size",
    "-q": "--quantization", "-tp": "--tensor-parallel-size",
}  # fmt: skip
_SWITCH = re.compile(r"^--(?:no-enable|disable|enable|no)-")  # beginnings of flags that turn something on or off
# Each release lists one of these spellings and accepts both (utils/argparse_utils.py, EnableDisableAction).
_OFF = ("--no-enable-prefix-caching", "--disable-prefix-caching")


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Values that the user set by flags of the engine. None: the plan decides. `passed` are passed on unchanged."""

    tensor: int | None = None
    pipeline: int | None = None
    block_size: int | None = None
    dtype: str | None = None
    attention_backend: str | None = None
    gdn_backend: str | None = None
    kv_bytes: int | None = None
    utilization: float | None = None
    graph_mode: str | None = None
    graph_sizes: tuple[int, ...] | None = None
    has_prefix_cache: bool | None = None
    is_text_only: bool | None = None
    passed: tuple[str, ...] = ()
    source: str = ""

    @property
    def runs_foreign_code(self) -> bool:
        return "--trust-remote-code" in self.passed


def read_pins(settings: Settings, engine: EngineFacts) -> Pins:
    """Read the setting engine_arg. Raises ConfigError (10) for a flag or value that is unknown to the engine, reserved
    for the appliance, or given twice."""
    if not settings.engine_arg:
        return Pins()
    reader = _Reader(settings.sources["engine_arg"])
    passed: list[str] = []
    found: dict[str, Any] = {}
    for word, values in grouped(settings.engine_arg):
        flag = _LONG.get(word, word)
        reader.check(flag, engine)
        reader.check_values(flag, values, engine)
        reader.check_once(flag)
        if flag == "--hf-overrides" and settings.is_set("rope_scaling"):
            reader.refuse(f"a flag that the setting rope_scaling gives as well: {flag}", "use one of them")
        if flag == THINKING_FLAG and settings.thinking != "auto":
            reader.refuse(f"a flag that the setting thinking gives as well: {flag}", "use one of them")
        taken = reader.pinned(flag, values)
        if twice := taken.keys() & found.keys():
            reader.refuse(
                f"what another of its flags says already: {flag} ({', '.join(twice)})", "leave one of them out"
            )
        found |= taken
        passed += [] if taken else [word, *values]
    return Pins(**found, passed=tuple(passed), source=reader.source)


def thinking_arguments(settings: Settings) -> tuple[str, ...]:
    """Return the argument that sets the default of a template's switch, by the names that templates have for it."""
    if settings.thinking == "auto":
        return ()
    is_on = settings.thinking == "on"
    return THINKING_FLAG, json.dumps({"enable_thinking": is_on, "thinking": is_on})


def grouped(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each flag with its values. The first word must be a flag."""
    starts = [at for at, word in enumerate(words) if is_flag(word)]
    for at, end in itertools.pairwise([*starts, len(words)]):
        yield words[at], tuple(words[at + 1 : end])


def _thing(flag: str) -> str:
    """Return what a flag is about: the same for `--enable-x`, `--disable-x` and `--no-enable-x`."""
    return _SWITCH.sub("--", flag)


class _Reader:
    """Checks for flags and values. `source` is where the setting came from; errors name it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._seen: set[str] = set()

    def check_once(self, flag: str) -> None:
        """Refuse a flag that was given before: vLLM would silently use the last one."""
        if _thing(flag) in self._seen:
            self.refuse(f"a flag twice: {flag}", "leave one of them out")
        self._seen.add(_thing(flag))

    def check_values(self, flag: str, values: Sequence[str], engine: EngineFacts) -> None:
        there = engine.choices_of(flag)
        other = [value for value in values if value not in there]
        if there and other:
            shown = difflib.get_close_matches(other[0], there, 3) or there[:_SHOWN]
            more = f" and {len(there) - len(shown)} more" if len(there) > len(shown) else ""
            self.refuse(f"a value that {flag} does not accept: '{other[0][:40]}'", f"one of {', '.join(shown)}{more}")

    def check(self, flag: str, engine: EngineFacts) -> None:
        if flag in OWNED:
            setting = SETTINGS[OWNED[flag]]
            self.refuse(f"a flag that the setting {setting.name} stands for: {flag}", f"use {setting.flag}")
        unoffered = {_thing(each): why for each, why in UNOFFERED.items()}
        of_family = next((why for start, why in _FAMILIES.items() if flag.startswith(start)), None)
        if why := unoffered.get(_thing(flag)) or of_family:
            self.refuse(f"a flag that cannot be given: {flag}", why)
        if engine.flags and flag not in (*engine.flags, *_OFF):
            near = difflib.get_close_matches(flag, engine.flags, 3)
            hint = f"perhaps you meant {' or '.join(near)}" if near else f"the engine is vLLM {engine.version}"
            self.refuse(f"a flag that this engine does not have: {flag}", hint)

    def pinned(self, flag: str, values: Sequence[str]) -> dict[str, Any]:
        """Return the fields of `Pins` that a flag sets; empty for a flag that the plan does not use."""
        numbers = {
            "--tensor-parallel-size": ("tensor", 1024), "--pipeline-parallel-size": ("pipeline", 1024),
            "--block-size": ("block_size", 1 << 20), "--kv-cache-memory-bytes": ("kv_bytes", 1 << 50),
        }  # fmt: skip
        texts = {"--dtype": "dtype", "--attention-backend": "attention_backend", "--gdn-prefill-backend": "gdn_backend"}
        if flag in numbers:
            name, most = numbers[flag]
            return {name: self._integer(flag, values, most)}
        if flag in texts:
            return {texts[flag]: self._one(flag, values)}
        switches = {"--enable-prefix-caching": ("has_prefix_cache", True), "--enforce-eager": ("graph_mode", EAGER)}
        switches |= dict.fromkeys(_OFF, ("has_prefix_cache", False))
        switches |= {"--language-model-only": ("is_text_only", True)}
        if flag in switches:
            name, value = switches[flag]
            return {name: value}
        if flag in ("--gpu-memory-utilization", "--device-memory-utilization"):
            return {"utilization": self._share(flag, values)}
        return self._compilation(flag, values) if flag == "--compilation-config" else {}

    def _compilation(self, flag: str, values: Sequence[str]) -> dict[str, Any]:
        try:
            found = json.loads(self._one(flag, values))
        except ValueError as error:
            self.refuse(f"no JSON for {flag}: {error}", 'as in --compilation-config {"cudagraph_mode":"PIECEWISE"}')
        known = {"cudagraph_mode", "cudagraph_capture_sizes"}
        if not isinstance(found, dict) or not found or set(found) - known:
            other = ", ".join(sorted(set(found) - known)) if isinstance(found, dict) else repr(found)[:60]
            self.refuse(f"keys of {flag} that no plan takes over: {other or 'none'}", f"give {' and '.join(known)}")
        pins: dict[str, Any] = {}
        if (mode := found.get("cudagraph_mode")) is not None:
            if mode not in GRAPH_MODES[:-1]:
                self.refuse(f"no mode of CUDA graphs: {mode!r:.40}", f"one of {', '.join(GRAPH_MODES[:-1])}")
            pins["graph_mode"] = mode
        if (sizes := found.get("cudagraph_capture_sizes")) is not None:
            if not isinstance(sizes, list) or not all(type(size) is int and 0 < size <= 8192 for size in sizes):
                self.refuse(f"sizes of CUDA graphs that are none: {sizes!r:.60}", "a list of numbers of tokens")
            pins["graph_sizes"] = tuple(sorted(set(sizes)))
        return pins

    def _one(self, flag: str, values: Sequence[str]) -> str:
        if len(values) != 1:
            self.refuse(f"{len(values)} values for {flag}, which takes one", "take out the rest")
        return values[0]

    def _integer(self, flag: str, values: Sequence[str], most: int) -> int:
        word = self._one(flag, values)
        if not (word.isascii() and word.isdecimal()) or not 1 <= int(word) <= most:
            self.refuse(f"no whole number from 1 to {most:,} for {flag}: '{word[:40]}'", "without a suffix: 1k is 1000")
        return int(word)

    def _share(self, flag: str, values: Sequence[str]) -> float:
        word = self._one(flag, values)
        try:
            share = float(word)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            self.refuse(f"no share above 0 and up to 1 for {flag}: '{word[:40]}'", "as in 0.9")
        return share

    def refuse(self, what: str, hint: str) -> NoReturn:
        message = f"setting engine_arg holds {what} ({self.source})"
        raise ConfigError(message, hint=hint)
