"""Defaults < /data/appliance.yaml < APPLIANCE_* variables < flags: resolved once, frozen, each value with its source.

The same words everywhere: the setting `ctx_size` is `--ctx-size`, `APPLIANCE_CTX_SIZE` and the key `ctx_size` (or
`ctx-size`) in the file. This is the only module that reads the process environment, and it does so only in
`process_environment`, so that a test can pass another one.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from appliance.errors import ConfigError, printable
from appliance.keep_alive import FOREVER, parse_keep_alive
from appliance.system.disk import hint_of_empty, read_file
from appliance.values import dataclass

PREFIX = "APPLIANCE_"
_MOUNTED = tuple(Path("/mnt") / name for name in ("ollama", "huggingface", "lmstudio", "models"))
_OWN = (".cache/huggingface/hub", ".ollama/models", ".lmstudio/models", ".cache/lm-studio/models")
# models in the image, and the folders of an Ollama that was installed as a service
_SYSTEM = (Path("/opt/models"), Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama/models"))
FILE_NAME = "appliance.yaml"
FILE_LIMIT_BYTES = 2**20
# Context lengths are multiples of this: one page of an engine's cache, or several. An engine rounds other values up,
# and every figure would be too small by one page.
CONTEXT_STEP = 256


def _text(value: str) -> str:
    if not value.strip():
        message = "is empty"
        raise ValueError(message)
    return value


def _switch(value: str) -> bool:
    """Return the boolean for on/off, true/false, yes/no or 1/0: people use all four spellings."""
    known = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
    if value.lower() not in known:
        message = "is neither on nor off"
        raise ValueError(message)
    return known[value.lower()]


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            message = "is not a whole number"
            raise ValueError(message) from None
        if not low <= number <= high:
            message = f"is outside {low} to {high}"
            raise ValueError(message)
        return number

    return parse


def _number_or(*words: str, most: int) -> Callable[[str], str | int]:
    """Return a parser of one of `words`, or of a number from 1 to `most`."""

    def parse(value: str) -> str | int:
        if value in words:
            return value
        try:
            return _integer(1, most)(value)
        except ValueError as error:
            message = f"is none of {', '.join(words)}, and {error}"
            raise ValueError(message) from None

    return parse


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(value: str) -> float:
        try:
            number = float(value.removesuffix("s"))
        except ValueError:
            message = "is not a number of seconds"
            raise ValueError(message) from None
        if not low <= number <= high:
            message = f"is outside {low:g} to {high:g} seconds"
            raise ValueError(message)
        return number

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in words:
            near = difflib.get_close_matches(value, words, 1)
            message = f"is none of {', '.join(words)}" + (f"; perhaps you meant '{near[0]}'" if near else "")
            raise ValueError(message)
        return value

    return parse


WORKLOADS = ("chat", "agent", "document")


def parse_jobs(value: str) -> tuple[tuple[str, float], ...]:
    """Return names of workloads with weights, from "chat" or "chat:3,agent:1". tune/workload.py defines the
    workloads."""
    jobs = []
    for word in value.split(","):
        name, colon, share = word.strip().partition(":")
        if name not in WORKLOADS:
            near = difflib.get_close_matches(name, WORKLOADS, 1)
            message = f"names no workload of {', '.join(WORKLOADS)}" + (f"; perhaps '{near[0]}'" if near else "")
            raise ValueError(message)
        if colon and not re.fullmatch(r"(?=.*[1-9])\d{1,6}(\.\d{1,6})?", share):
            message = "has a weight that is not a positive number"
            raise ValueError(message)
        jobs.append((name, float(share) if colon else 1.0))
    return tuple(jobs)


def _kv_type(value: str) -> str:
    """Return one type for K and V, or a pair as in "q8_0/q4_0". The image's engine says which types exist."""
    if not re.fullmatch(r"\w+(/\w+)?", value, re.ASCII) or ("/" in value and "auto" in value.split("/")):
        message = "is no type, or two as in q8_0/q4_0"
        raise ValueError(message)
    k, slash, v = value.partition("/")
    return k if slash and k == v else value


def _workload(value: str) -> str:
    parse_jobs(value)
    return value


_NAME_BYTES, _PATH_BYTES = 255, 4095  # Linux: NAME_MAX, and PATH_MAX less its NUL


def _url(value: str) -> str:
    """Return the address of a server. Raises ValueError if it is none, or if it holds a password."""
    if not re.fullmatch(r"https?://[^/\s@?#]+(/[^\s@?#]*)?", value):
        message = "is no address such as http://collector:4318"
        raise ValueError(message)
    return value.rstrip("/")


def _path(value: str) -> Path:
    """Return the path. Raises ValueError if it is longer than the kernel allows: pathlib would raise ENAMETOOLONG
    later."""
    path = Path(value)
    sizes = [len(os.fsencode(part)) for part in path.parts]
    if len(os.fsencode(path)) > _PATH_BYTES or max(sizes, default=0) > _NAME_BYTES:
        message = f"is longer than a path can be ({_PATH_BYTES:,} bytes, {_NAME_BYTES} in each name)"
        raise ValueError(message)
    return path


def parse_folders(value: str) -> tuple[Path, ...]:
    """Return absolute paths separated by commas; empty for `none`. Raises ValueError for a path that is not
    absolute."""
    words = [] if value.strip() == "none" else [word.strip() for word in value.split(",")]
    for word in words:
        if not word.startswith("/"):
            message = f"holds a path that does not begin with /: '{word}'" if word else "holds an empty path"
            raise ValueError(message)
    return tuple(Path(word) for word in words)


def _folders(value: str) -> str:
    parse_folders(value)
    return value


_FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9._-]*")


def is_flag(word: str) -> bool:
    """True for a word that is a flag; False for a negative number such as `-1` or `-0.5`."""
    return _FLAG.fullmatch(word) is not None


def _device_list(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    if not all(names):
        message = "names no GPU between its commas" if "," in value else "is empty"
        raise ValueError(message)
    if twice := next((name for name in names if names.count(name) > 1), None):
        message = f"names {twice} twice"
        raise ValueError(message)
    return _text(value)


def _engine_arguments(value: str) -> tuple[str, ...]:
    """Return one or more flags with their values, quoted as in a shell: `--top-k 20 --chat-template "a b"`."""
    import shlex  # imported here, since few starts need it

    if not value.isprintable():
        message = "contains a line break or another unprintable character"
        raise ValueError(message)
    try:
        words = shlex.split(value)
    except ValueError:
        message = "has a quotation mark that is not closed"
        raise ValueError(message) from None
    split = [half for word in words for half in _halves(word)]
    if not split or not is_flag(split[0]):
        message = "does not begin with a flag of the engine"
        raise ValueError(message)
    return tuple(split)


def _halves(word: str) -> tuple[str, ...]:
    """Return `--top-k=20` as the two words that the engine takes."""
    flag, equals, value = word.partition("=")
    return (flag, value) if equals and is_flag(flag) else (word,)


def _address(value: str) -> str:
    parse_address(value)
    return value


_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?"  # host name
_ADDRESS = re.compile(rf"(?:\[([0-9A-Fa-f:.]+)\]|({_NAME}))(?::(\d{{1,5}}))?")


def parse_address(value: str) -> tuple[str, int | None]:
    """Return the host, and the port or None: `node-0:11435`, `10.0.0.1`, `[fd00::1]:11435`. Raises ValueError
    otherwise."""
    found = _ADDRESS.fullmatch(value)
    if found is None or not _has_labels(found[2] or "a") or not 1 <= int(found[3] or 1) <= 65535:
        message = "is not a host or HOST:PORT"
        raise ValueError(message)
    return found[1] or found[2], int(found[3]) if found[3] else None


def _has_labels(name: str) -> bool:
    """True if a resolver accepts the name: no label is empty or longer than 63 characters."""
    return all(0 < len(label) <= 63 for label in name.removesuffix(".").split("."))


LORA_SCALE_MAX = 100.0


def _adapters(value: str) -> tuple[str, ...]:
    """Return adapter names separated by commas, each with or without `:SCALE`."""
    words = tuple(word.strip() for word in value.split(","))
    for word in words:
        parse_adapter(word)
    return words


def parse_adapter(word: str) -> tuple[str, float]:
    """Return name and scale of `style.gguf:0.5`; the scale is 1 if none is given. Raises ValueError for a value that
    the engine's own form could not express."""
    name, colon, scale = word.partition(":")
    if not name or not word.isprintable():
        message = "holds an empty name" if not name else "holds a character that no file's name should have"
        raise ValueError(message)
    if colon and not re.fullmatch(r"-?\d{1,3}(\.\d{1,6})?", scale):
        message = f"has a scale that is not a number: '{printable(scale)}'"
        raise ValueError(message)
    number = float(scale) if colon else 1.0
    if abs(number) > LORA_SCALE_MAX:
        message = f"has a scale outside -{LORA_SCALE_MAX:g} to {LORA_SCALE_MAX:g}"
        raise ValueError(message)
    return name, number


def _setting(
    parse: Callable[[str], Any],
    default: Any,  # noqa: ANN401
    help_text: str,
    metavar: str,
    *,
    is_list: bool = False,
    is_rare: bool = False,
) -> Any:  # noqa: ANN401
    metadata = {"parse": parse, "help": help_text, "metavar": metavar, "is_list": is_list, "is_rare": is_rare}
    return field(default=default, metadata=metadata)


MODES = ("balanced", "speed", "context")
POOLINGS = ("none", "mean", "cls", "last", "rank")
# Settings that an engine may support or ignore; each engine lists those that it supports.
ENGINE_SETTINGS = frozenset({
    "allow_disk", "cache_disk_mib", "cache_ram_mib", "chat_template_file", "cpu_variant", "devices", "draft_model",
    "draft_tokens", "engine_arg", "experts_used", "fill_minutes", "gpu_layers", "kv_type", "load_mode", "lora",
    "mmproj", "moe_slots", "n_cpu_moe", "numa", "parallel", "pooling", "quantize", "reasoning_format", "reserve_mib",
    "rope_scaling", "speculation", "thinking", "threads", "trace_experts", "ubatch",
})  # fmt: skip


# LeaderWorkerSet sets these variables in each pod of a group; they are the defaults of our three settings:
# kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go. They are ignored in a pod that serves alone.
_GROUP_MAX = 10**6  # largest LeaderWorkerSet group: every verb must work in it; `serve` allows NODES_MAX
NODES_MAX = 64
_GROUP = {"nodes": "LWS_GROUP_SIZE", "node_rank": "LWS_WORKER_INDEX", "leader": "LWS_LEADER_ADDRESS"}


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model of `models:` in the settings file. `name` is what clients call it, and `values` are the settings that
    it has for itself, parsed."""

    name: str
    is_pinned: bool  # it is loaded at the start and stays loaded
    values: Mapping[str, Any]
    source: str  # in words
    aliases: tuple[str, ...] = ()  # other names that clients may use


# Settings of the process: they cannot differ from model to model.
OF_PROCESS = frozenset({
    "auth", "data_dir", "drain_s", "engine_dir", "facts_dir", "hf_cache", "host", "leader", "load_wait_s", "log",
    "model_dirs", "node_rank", "nodes", "offline", "otlp_endpoint", "port", "receipts", "runtime_dir",
})  # fmt: skip
# Settings that are about one model: as a flag or variable they are those of the first model only.
OF_ONE_MODEL = (
    "alias", "chat_template_file", "ctx_size", "draft_model", "draft_tokens", "engine_arg", "experts_used",
    "gpu_layers", "lora", "mmproj", "model", "moe_slots", "n_cpu_moe", "pooling", "quantize", "reasoning_format",
    "rope_scaling", "speculation", "thinking", "trace_experts",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All values that a user can set. `sources` maps each name to the source of its value, in words."""

    model: str | None = _setting(
        _text,
        None,
        "model to serve: a file on the volume, a variant of the image's recipe (qwen:8b-q4), org/repo[:QUANT] or a URL",
        "MODEL",
    )
    data_dir: Path = _setting(_path, Path("/data"), "the volume", "DIR")
    model_dirs: str | None = _setting(
        _folders,
        None,
        "mounted folders of other tools to read models from, separated by commas, or none "
        "(default: /mnt/ollama, /mnt/huggingface, /mnt/lmstudio, /mnt/models and the tools' own, if they exist)",
        "LIST",
        is_rare=True,
    )
    host: str = _setting(_text, "0.0.0.0", "address to listen on inside the container", "ADDRESS", is_rare=True)  # noqa: S104
    port: int = _setting(_integer(1, 65535), 11435, "port to listen on", "PORT")
    auth: bool = _setting(_switch, True, "ask for the API key", "on|off")
    alias: str | None = _setting(_text, None, "name of the model in the API (default: the file's name)", "NAME")
    ctx_size: int | None = _setting(
        _integer(CONTEXT_STEP, 2**24),
        None,
        "context length in tokens (default: as much as fits in memory, at most the model's native length)",
        "N",
    )
    fill_minutes: int = _setting(
        _integer(0, 100_000),
        10,
        "minutes that reading a full context may take, unless --ctx-size or mode context asks for more; 0: no limit",
        "N",
        is_rare=True,
    )
    rope_scaling: str = _setting(
        _one_of("auto", "yarn"),
        "auto",
        "auto: as the model file says; yarn: allow a --ctx-size above the model's native length, at some loss",
        "KIND",
        is_rare=True,
    )
    kv_type: str = _setting(
        _kv_type, "auto", "KV cache type: f16, q8_0 and others; separate types for K and V as in q8_0/q4_0", "TYPE"
    )
    threads: int | None = _setting(
        _integer(1, 4096),
        None,
        "threads of the engine (default: measured); beside other work fewer of them may decode",
        "N",
        is_rare=True,
    )
    cpu_variant: str = _setting(
        _text,
        "auto",
        "build of the engine's CPU kernels, such as haswell (default: the fastest that this CPU can run)",
        "NAME",
        is_rare=True,
    )
    ubatch: int | None = _setting(
        _integer(16, 16384), None, "prompt tokens computed in one step (default: measured)", "N", is_rare=True
    )
    parallel: int = _setting(
        _integer(1, 256), 4, "requests served at the same time: an expert's override of --users", "N"
    )
    cache_ram_mib: int | None = _setting(
        _integer(0, 2**22),
        None,
        "the engine's prompt cache, MiB (default: from the memory that is left)",
        "MIB",
        is_rare=True,
    )
    cache_disk_mib: int = _setting(
        _integer(0, 2**24),
        16384,
        "prompts kept on the volume over restarts, MiB of all models, at most a quarter of its free space; 0: none",
        "MIB",
        is_rare=True,
    )
    devices: str = _setting(
        _device_list, "auto", "GPUs to use: auto, none, or indices or UUIDs separated by commas", "LIST"
    )
    gpu_layers: int | None = _setting(
        _integer(0, 1024), None, "layers on GPUs; the output layer counts as one (default: the fastest that fits)", "N"
    )
    n_cpu_moe: int | None = _setting(
        _integer(0, 1024), None, "first layers whose experts stay in host memory (default: the fastest that fits)", "N"
    )
    moe_slots: str | int = _setting(
        _number_or("auto", "off", most=4096),
        "auto",
        "slots a layer on the GPU for experts that lie in host memory. auto: measured if predicted to be clearly "
        "faster; off; or a number, served at once",
        "auto|off|N",
        is_rare=True,
    )
    experts_used: int | None = _setting(
        _integer(1, 4096),
        None,
        "fewer experts for each token than the model was trained with: faster, and answers change",
        "N",
        is_rare=True,
    )
    trace_experts: bool = _setting(
        _switch,
        False,
        "record which experts each token uses, no text, in a file of at most 64 MiB on the volume; slows decoding",
        "on|off",
        is_rare=True,
    )
    reserve_mib: int = _setting(
        _integer(0, 2**20), 0, "memory to leave free on each GPU for other programs, MiB", "MIB"
    )
    tier: str = _setting(
        _one_of("auto", "quality", "balanced", "compact"),
        "auto",
        "quantization of a recipe or a repository. quality: near the original; balanced: usual; compact: small "
        "(default: the best for this machine)",
        "TIER",
    )
    quantize: str = _setting(
        _one_of("auto", "off", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M"),
        "auto",
        "quantize a file of F16, BF16 or F32 once and serve the result. auto: to the largest type that fits and is "
        "faster; off; or one type",
        "auto|off|TYPE",
        is_rare=True,
    )
    load_mode: str = _setting(
        _one_of("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"),
        "auto",
        "how the engine loads weights into memory",
        "MODE",
        is_rare=True,
    )
    numa: str = _setting(
        _one_of("auto", "off", "distribute", "isolate", "numactl"),
        "auto",
        "placement of threads on a machine with several NUMA nodes: the engine's mode of that name; off: no placement",
        "MODE",
        is_rare=True,
    )
    allow_disk: bool = _setting(
        _switch, False, "start even if the weights exceed memory, and read them from disk", "on|off"
    )
    mode: str = _setting(
        _one_of(*MODES),
        "balanced",
        "balanced: the largest context that keeps 0.7 of the best speed, or up to 65,536 tokens at "
        "30 tok/s half full; speed: the shortest job; "
        "context: the largest context that still decodes 15 tok/s when full",
        "MODE",
    )
    workload: str = _setting(
        _workload,
        "chat",
        "requests to optimize for: chat, agent, document, or a mix as in chat:3,agent:1",
        "JOBS",
    )
    users: int = _setting(
        _integer(1, 256),
        1,
        "people who use the model at the same time; --parallel sets the requests themselves",
        "N",
    )
    speculation: str = _setting(
        _one_of("auto", "stable", "fast", "off", "ngram", "draft", "mtp"),
        "auto",
        "speculative decoding. auto: best overall throughput; stable: never slows any kind of request; "
        "fast: best speed-up for one kind; off; or one method: ngram, draft, mtp",
        "KIND",
    )
    draft_model: str | None = _setting(
        _text, None, "draft model for speculative decoding: a file name on the volume, or a path", "MODEL"
    )
    draft_tokens: int | None = _setting(
        _integer(1, 64),
        None,
        "draft tokens of each step, with --speculation mtp, draft or ngram; default: measuring chooses them",
        "N",
        is_rare=True,
    )
    mmproj: str = _setting(
        _text,
        "auto",
        "projector for images and audio. auto: the one in the model's folder; off; "
        "or a file name on the volume, or a path",
        "auto|off|FILE",
    )
    lora: tuple[str, ...] = _setting(
        _adapters,
        (),
        "LoRA adapter: a file name on the volume, or a path, and :SCALE if it is not 1; may be given several times, "
        "or as a list separated by commas",
        "NAME[:SCALE]",
        is_list=True,
    )
    pooling: str = _setting(
        _one_of("auto", *POOLINGS),
        "auto",
        "pooling of vectors. auto: as the model file says; none, mean, cls or last: serve it for embeddings; "
        "rank: serve it as a reranker",
        "TYPE",
    )
    chat_template_file: Path | None = _setting(
        _path, None, "Jinja chat template to use instead of the model's own", "FILE"
    )
    reasoning_format: str = _setting(
        _one_of("auto", "none", "deepseek", "deepseek-legacy"),
        "auto",
        "where answers hold reasoning. auto: the engine's default; none: in the text; deepseek: in reasoning_content; "
        "deepseek-legacy: both",
        "FORMAT",
        is_rare=True,
    )
    thinking: str = _setting(
        _one_of("auto", "on", "off"),
        "auto",
        "whether a model whose chat template has a switch reasons before it answers, unless a request says it. "
        "auto: the template's default",
        "on|off|auto",
        is_rare=True,
    )
    engine_arg: tuple[str, ...] = _setting(
        _engine_arguments,
        (),
        'arguments passed to the engine as they are, quoted as in a shell: "--top-k 20 --no-warmup"; may be given '
        "several times; flags that the plan sets are refused",
        '"--FLAG VALUE"',
        is_list=True,
    )
    nodes: int = _setting(
        _integer(1, _GROUP_MAX),
        1,
        "number of hosts that serve the model together, each with a part of its layers",
        "N",
        is_rare=True,
    )
    node_rank: int = _setting(
        _integer(0, _GROUP_MAX),
        0,
        "index of this host, 0 to nodes - 1; clients talk to host 0, the leader",
        "N",
        is_rare=True,
    )
    leader: str | None = _setting(
        _address,
        None,
        "address of host 0, for the other hosts; the port defaults to --port",
        "HOST[:PORT]",
        is_rare=True,
    )
    keep_alive: float | None = _setting(
        parse_keep_alive,
        None,
        "how long a model stays loaded without requests, as in 10m (default: until its memory is needed)",
        "TIME",
        is_rare=True,
    )
    load_wait_s: float = _setting(
        _seconds(0, 3600),
        120.0,
        "seconds that a request without a stream waits for its model to be loaded, before it is answered with 503",
        "S",
        is_rare=True,
    )
    tune: str = _setting(
        _one_of("first", "idle", "off"),
        "idle",
        "idle: serve the predicted plan at once, measure while idle; first: measure before serving; off: never measure",
        "WHEN",
    )
    idle_s: float = _setting(
        _seconds(1, 604800),
        600.0,
        "with tune idle: time without requests before the engine may be reloaded",
        "SECONDS",
    )
    budget_s: float = _setting(
        _seconds(5, 86400),
        120.0,
        "time limit for measuring before serving, by the verb tune, or while a client waits for the result",
        "SECONDS",
    )
    loads_a_day: int = _setting(
        _integer(1, 10000),
        20,
        "in idle time: at most so many engine loads a day (UTC) for measuring and comparing, which go on the next day",
        "COUNT",
        is_rare=True,
    )
    check_abilities: bool = _setting(
        _switch,
        True,
        "check in idle time, after measuring, what this model can do here: tool calls, reasoning, documents "
        "(with tune off: never)",
        "on|off",
        is_rare=True,
    )
    check_profile: bool = _setting(
        _switch,
        True,
        "check in idle time, after measuring, that the profile can be trusted: speculative decoding changes no "
        "answers, facts are found in the whole context, a soak with tools (with tune off: never)",
        "on|off",
        is_rare=True,
    )
    soak_s: float = _setting(
        _seconds(0, 86400),
        600.0,
        "seconds of the soak, split over idle periods (0: none)",
        "SECONDS",
        is_rare=True,
    )
    receipts: str = _setting(
        _one_of("asked", "always", "off"),
        "asked",
        "receipts in the usage of answers: if a request asks for one, always, or never",
        "asked|always|off",
        is_rare=True,
    )
    otlp_endpoint: str | None = _setting(
        _url,
        None,
        "collector of OpenTelemetry that gets a trace of each request, over HTTP in JSON; never text",
        "URL",
        is_rare=True,
    )
    drain_s: float = _setting(_seconds(0, 3600), 5.0, "time for running streams to finish when stopping", "SECONDS")
    stall_timeout_s: float = _setting(
        _seconds(1, 86400),
        120.0,
        "kill the engine if it does nothing for this time, while it loads or while requests wait",
        "SECONDS",
        is_rare=True,
    )
    offline: bool = _setting(
        _switch, False, "download nothing: serve what is on the volume, or exit (also HF_HUB_OFFLINE=1)", "on|off"
    )
    hf_cache: Path | None = _setting(
        _path,
        None,
        "mounted Hugging Face cache to read models from; never written "
        "(default: HF_HUB_CACHE, or ~/.cache/huggingface/hub if it is mounted)",
        "DIR",
        is_rare=True,
    )
    log: str = _setting(
        _one_of("auto", "text", "json"), "auto", "auto: text on a terminal, JSON lines otherwise", "FORMAT"
    )
    engine_dir: Path | None = _setting(
        _path, None, "folder of the engine's binaries (default: the engine's folder in /opt)", "DIR", is_rare=True
    )
    facts_dir: Path = _setting(_path, Path("/opt/appliance"), "folder of the image's facts", "DIR", is_rare=True)
    runtime_dir: Path = _setting(_path, Path("/tmp"), "folder for the engine's socket", "DIR", is_rare=True)  # noqa: S108
    models: tuple[ModelEntry, ...] = ()  # further models, which only the file can name
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    # default of `model_dirs`; most of these folders do not exist
    usual_model_dirs: tuple[Path, ...] = field(default=(), compare=False)
    # Other variables of this process: an engine looks for its own among them, and names those that it ignores.
    environment: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def is_set(self, name: str) -> bool:
        """True if a user gave this value."""
        return self.sources.get(name, "default") != "default"

    @property
    def slots(self) -> int:
        """Number of requests that run in parallel: `parallel` if it was set. The default is enough for three users and
        grows with more: one slot per user and one for a title or an editor's request."""
        return self.parallel if self.is_set("parallel") else max(self.parallel, self.users + 1)

    @property
    def slots_source(self) -> str:
        """Source of `slots`, in words."""
        decides = "parallel" if self.is_set("parallel") or self.slots == self.parallel else "users"
        return self.sources.get(decides, "default")

    def of_entry(self, entry: ModelEntry, *, is_first: bool = False) -> Settings:
        """Return the settings of one model of `models`. What is about one model is inherited only by the first."""
        before = self if is_first else self.of_another()
        sources = {**before.sources, **dict.fromkeys(entry.values, entry.source)}
        return replace(before, **entry.values, sources=MappingProxyType(sources))

    def first_model(self) -> tuple[Settings, ModelEntry | None]:
        """Return the settings of the model that is loaded first, and its entry in the file if it has one.

        That is the one that `model` names, else the first of the file.
        """
        if not self.models:
            return self, None
        entry = self.models[0]
        if self.is_set("model"):
            wanted = (self.model or "").casefold()
            named = [each for each in self.models if wanted in map(str.casefold, (each.name, *each.aliases))]
            named = named or [each for each in self.models if each.values["model"].casefold() == wanted]
            if not named:
                return self, None
            entry = named[0]
        return self.of_entry(entry, is_first=True), entry

    def of_another(self) -> Settings:
        """Return the settings of a model that is not the first one."""
        defaults: dict[str, Any] = {name: SETTINGS[name].default for name in OF_ONE_MODEL}
        sources = {**self.sources, **dict.fromkeys(OF_ONE_MODEL, "default")}
        return replace(self, **defaults, sources=MappingProxyType(sources))

    @property
    def keep_alive_s(self) -> float:
        """How long a model stays loaded without requests; infinity if nothing was set."""
        return FOREVER if self.keep_alive is None else self.keep_alive

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def profiles_dir(self) -> Path:
        return self.data_dir / "profiles"

    @property
    def address_path(self) -> Path:
        """File in which a running gateway writes its address. `health` reads it, since it does not know the flags of
        `serve`."""
        return self.runtime_dir / "appliance.address"

    @property
    def key_path(self) -> Path:
        return self.data_dir / "secrets" / "api_key"

    @property
    def usage_path(self) -> Path:
        return self.data_dir / "usage.sqlite3"

    @property
    def prompts_dir(self) -> Path:
        """Folder of the prompts that engines keep on disk."""
        return self.data_dir / "cache" / "prompts"

    @property
    def experts_dir(self) -> Path:
        """Folder of what engines learn and record of a mixture's experts."""
        return self.data_dir / "cache" / "experts"

    @property
    def prompts_secret_path(self) -> Path:
        """Secret with which engines check the files of `prompts_dir`."""
        return self.data_dir / "secrets" / "prompts"

    @property
    def named_keys_path(self) -> Path:
        return self.data_dir / "secrets" / "keys.json"


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """How files are downloaded. The token is in no repr, no message and no command line."""

    endpoint: str = "https://huggingface.co"
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    read_only_roots: tuple[Path, ...] = ()  # hub caches that are read and never written
    patience_s: float = 120.0  # a download fails after so long without a byte, over all attempts
    # Largest download by one request. The hub sends at most 50 GB by a plain one (huggingface_hub 2.4.0, constants.py,
    # MAX_HTTP_DOWNLOAD_SIZE), and its signed addresses last an hour.
    piece_bytes: int = 8 * 2**30
    # Logins of container registries, read when a registry asks: the text of a Docker config, and files of them.
    docker_auth: str | None = field(default=None, repr=False)
    docker_configs: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: name, help, default and parser, shared by `--help`, the variables and the file."""

    name: str
    help: str
    metavar: str
    default: object
    parse: Callable[[str], Any]
    is_list: bool = False  # may be given several times; `parse` returns a tuple for each time
    is_rare: bool = False  # True for what few people set: `--help-all` shows it, `--help` does not

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        f.name: Setting(
            name=f.name,
            help=f.metadata["help"],
            metavar=f.metadata["metavar"],
            default=f.default if f.default is not MISSING else None,
            parse=f.metadata["parse"],
            is_list=f.metadata["is_list"],
            is_rare=f.metadata["is_rare"],
        )
        for f in fields(Settings)
        if f.metadata
    }
)


def process_environment() -> Mapping[str, str]:
    """Return the environment of this process. No other code reads it."""
    return dict(os.environ)


Texts = str | Sequence[str]  # several texts for a setting that may be given several times


def resolve_settings(
    flags: Mapping[str, Texts], environment: Mapping[str, str], file_text: str | None = None, file_name: str = FILE_NAME
) -> Settings:
    """Return the settings from file, environment and flags; later sources win. Raises ConfigError with the bad value
    and its source."""
    values: dict[str, Any] = {}
    sources = dict.fromkeys(SETTINGS, "default")
    from_flags = [(name, text, f"flag {SETTINGS[name].flag}") for name, text in flags.items()]
    of_file = _of_file(file_text, file_name)
    entries = _entries(of_file.pop("models", None), file_name)
    own = (*_from_file(of_file, file_name), *_from_environment(environment), *from_flags)
    rows = (*_of_group(environment, own), *own)
    for name, text, source in rows:
        values[name] = _parsed(name, text, source)
        sources[name] = source
    usual = _usual_model_dirs(environment)
    others = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
    return Settings(
        **values, models=entries, sources=MappingProxyType(sources), usual_model_dirs=usual, environment=others
    )


def _usual_model_dirs(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders named by the tools' own variables, our mount points, and the tools' defaults. Sources:
    weights/stores.md."""
    named = (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("OLLAMA_MODELS", ""))
    folders = [Path(environment[name]) / below for name, below in named if environment.get(name, "").startswith("/")]
    homes = [Path(home) for home in (environment.get("HOME", ""), "/root") if home.startswith("/")]
    folders += [*_MOUNTED, *(home / own for home in homes for own in _OWN), *_SYSTEM]
    return tuple(dict.fromkeys(folders))


def load_settings(flags: Mapping[str, Texts], environment: Mapping[str, str]) -> Settings:
    """Read the settings file on the volume that flags and environment name, then resolve all settings. Raises
    ConfigError."""
    without_file = resolve_settings(flags, environment)
    path = without_file.data_dir / FILE_NAME
    try:
        text = read_file(path, FILE_LIMIT_BYTES).decode()
    except FileNotFoundError:
        return without_file
    except (OSError, UnicodeDecodeError) as error:
        message = f"settings file cannot be read: {path}: {error}"
        raise ConfigError(message, hint=hint_of_empty(path) or "repair or remove the file") from error
    return resolve_settings(flags, environment, text, str(path))


# weights in the image, and the usual mount points of a user's or root's cache
_ROOTS = (Path("/opt/models"), Path("/root/.cache/huggingface/hub"))


def hub_settings(settings: Settings, environment: Mapping[str, str]) -> HubSettings:
    """Return the download settings, from our settings and from the variables that all programs of the hub read. An
    empty variable counts as not set. Raises ConfigError for an invalid variable."""
    given = {name: environment.get(name, "").strip() for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE")}
    endpoint = (given["HF_ENDPOINT"] or HubSettings().endpoint).rstrip("/")
    if not re.fullmatch(r"https?://[^/\s@]+(/[^\s@]*)?", endpoint):
        message = f"variable HF_ENDPOINT is not the address of a hub: '{endpoint}'"
        raise ConfigError(message, hint="as in HF_ENDPOINT=https://huggingface.co")
    if not re.fullmatch(r"[\x21-\x7e]*", given["HF_TOKEN"]):
        message = "variable HF_TOKEN is not a token: it contains spaces or other characters that a header cannot carry"
        raise ConfigError(message, hint="a token looks like hf_ and 34 letters; huggingface.co/settings/tokens")
    is_offline = given["HF_HUB_OFFLINE"].upper() in ("1", "ON", "YES", "TRUE")
    return HubSettings(
        endpoint=endpoint,
        token=given["HF_TOKEN"] or None,
        offline=settings.offline if settings.is_set("offline") else is_offline,
        read_only_roots=_roots(settings, environment),
        docker_auth=environment.get("DOCKER_AUTH_CONFIG", "").strip() or None,
        docker_configs=_docker_configs(environment),
    )


def _docker_configs(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return where Docker's own client looks, and root's usual mount point."""
    if folder := environment.get("DOCKER_CONFIG", "").strip():
        return (Path(folder) / "config.json",)
    homes = dict.fromkeys(home for home in (environment.get("HOME", ""), "/root") if home)
    return tuple(Path(home) / ".docker/config.json" for home in homes)


def _roots(settings: Settings, environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the hub caches that exist. Raises ConfigError if `hf_cache` is set and is not a folder."""
    if settings.hf_cache and not _is_folder(settings.hf_cache):
        message = f"setting hf_cache is not a folder: '{settings.hf_cache}' ({settings.sources.get('hf_cache', '')})"
        raise ConfigError(message, hint="mount it, as in `-v ~/.cache/huggingface/hub:/hub:ro --hf-cache /hub`")
    named = [Path(text) for name in ("HF_HUB_CACHE",) if (text := environment.get(name))]
    named += [Path(text) / "hub" for name in ("HF_HOME",) if (text := environment.get(name))]
    # Models in a hub cache that `models list` shows must not be downloaded again.
    listed = settings.usual_model_dirs
    if settings.model_dirs is not None:
        listed = parse_folders(settings.model_dirs)
    named = [settings.hf_cache] if settings.hf_cache else named
    wanted = (*named, *_ROOTS, *listed)
    return tuple(dict.fromkeys(path for path in wanted if path != settings.models_dir and _is_folder(path)))


def _is_folder(path: Path) -> bool:
    """True if `path` is a folder. False if we may not look, as in another user's home: nothing could be read there
    either."""
    try:
        return path.is_dir()
    except OSError:
        return False


_Row = tuple[str, Texts, str]  # name, text, source


def _of_file(text: str | None, file_name: str) -> dict[Any, Any]:
    if text is None or not text.strip():
        return {}
    import yaml  # imported here: it costs 20 ms of every start and is needed only if there is a file

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        message = f"settings file is not YAML: {file_name}: {' '.join(str(error).split())}"
        raise ConfigError(message, hint="lines look like `ctx_size: 8192`") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        message = f"settings file must hold `name: value` lines: {file_name}: found {type(data).__name__}"
        raise ConfigError(message, hint="lines look like `ctx_size: 8192`")
    return data


def _from_file(data: Mapping[Any, Any], file_name: str) -> list[_Row]:
    rows: list[_Row] = []
    for key, value in data.items():
        name = _known(str(key).replace("-", "_"), f"file {file_name}", str(key), tuple(SETTINGS))
        if value is not None:
            rows.append((name, _yaml_texts(name, str(key), value, file_name), f"file {file_name}"))
    return rows


_ENTRY_HINT = """lines look like

models:
  chat: {model: "qwen:8b", ctx_size: 32768}
  embed: {model: nomic-embed-text.gguf, pin: on}"""


def _entries(written: object, file_name: str) -> tuple[ModelEntry, ...]:
    """Return the models of the file: names with their settings, or a list. Raises ConfigError."""
    if written is None:
        return ()
    named: list[tuple[str, object]]
    if isinstance(written, dict):
        named = [("" if name is None else _yaml_word(name).strip(), of_one) for name, of_one in written.items()]
    elif isinstance(written, list):
        named = [("", of_one) for of_one in written]
    else:
        message = f"setting models in {file_name} is neither names with settings nor a list: {type(written).__name__}"
        raise ConfigError(message, hint=_ENTRY_HINT)
    entries = tuple(_entry(name, of_one, file_name) for name, of_one in named)
    seen: set[str] = set()
    for entry in entries:
        if entry.name.casefold() in seen:
            message = f"two models in {file_name} have the same name: '{printable(entry.name)}'"
            raise ConfigError(message, hint="give one of them another name, or an alias")
        seen.add(entry.name.casefold())
    _check_aliases(entries, file_name)
    return entries


def _check_aliases(entries: Sequence[ModelEntry], file_name: str) -> None:
    """Raise ConfigError if an alias is also a name, an alias or the file of another model.

    Of several entries with one file, one may have the file's name as its alias.
    """
    files = {entry.name: _file_names(entry) for entry in entries}
    for entry, other in itertools.permutations(entries, 2):
        theirs = {other.name, *other.aliases, *(files[other.name] - files[entry.name])}
        lowered = {name.casefold() for name in theirs}
        if (alias := next((alias for alias in entry.aliases if alias.casefold() in lowered), None)) is not None:
            names = f"'{printable(entry.name)}' and '{printable(other.name)}'"
            message = f"'{printable(alias)}' means two models in {file_name}: {names}"
            raise ConfigError(message, hint=f"give '{printable(entry.name)}' another alias")


def _file_names(entry: ModelEntry) -> set[str]:
    file = str(entry.values["model"]).rpartition("/")[2]
    return {file, file.removesuffix(".gguf")}


def _entry(name: str, written: object, file_name: str) -> ModelEntry:
    if not name and isinstance(written, str):
        written = {"model": written}
    if written is None:
        written = {}
    if not isinstance(written, dict):
        who = printable(name) or "(without a name)"
        message = f"model {who} in {file_name} has no settings: '{printable(str(written))}'"
        raise ConfigError(message, hint=_ENTRY_HINT)
    found = {str(key).replace("-", "_"): (str(key), value) for key, value in written.items()}
    name = name or _entry_word(found, "alias", file_name) or _entry_word(found, "model", file_name)
    if not name.strip():
        message = f"a model in {file_name} has neither a name nor a `model`"
        raise ConfigError(message, hint=_ENTRY_HINT)
    _check_name(name, file_name)
    source = f"model {name} in file {file_name}"
    known = tuple(setting for setting in SETTINGS if setting not in OF_PROCESS)
    values: dict[str, Any] = {"model": name}
    is_pinned = False
    for setting, (key, value) in found.items():
        if setting == "pin":
            is_pinned = _pin(value, source)
        elif setting in OF_PROCESS:
            message = f"setting {key} cannot differ from model to model ({source})"
            raise ConfigError(message, hint=f"write `{setting}:` at the top of {file_name}, for all models")
        elif value is not None:
            _known(setting, source, key, (*known, "pin"))
            values[setting] = _parsed(setting, _yaml_texts(setting, key, value, file_name), source)
    alias = values.pop("alias", name)
    _check_name(alias, file_name)
    aliases = () if alias == name else (alias,)
    values = {**values, "alias": name}
    return ModelEntry(name=name, is_pinned=is_pinned, values=values, source=source, aliases=aliases)


def _check_name(name: str, file_name: str) -> None:
    """Raises ConfigError for a name that no command line and no line of a log can hold."""
    if not name.isprintable():
        message = f"a model in {file_name} has a name with control characters: '{printable(name)}'"
        raise ConfigError(message, hint=_ENTRY_HINT)


def _entry_word(found: Mapping[str, tuple[str, object]], key: str, file_name: str) -> str:
    shown, value = found.get(key, (key, None))
    text = "" if value is None else _yaml_texts(key, shown, value, file_name)
    return text if isinstance(text, str) else ""


def _pin(value: object, source: str) -> bool:
    try:
        return _switch(_yaml_word(value))
    except ValueError as problem:
        message = f"pin {problem}: '{printable(str(value))}' ({source})"
        raise ConfigError(message, hint="`pin: on` keeps a model loaded") from None


def _yaml_texts(name: str, key: str, value: object, file_name: str) -> Texts:
    """Return one text, or a list for a setting that may be given several times. Raises ConfigError for another type."""
    items = value if isinstance(value, list) and SETTINGS[name].is_list else [value]
    wrong = next((item for item in items if item is None or isinstance(item, dict | list)), items)
    if wrong is not items:
        message = f"setting {key} in {file_name} takes one value, not a {type(wrong).__name__}"
        if SETTINGS[name].is_list:
            message = (
                f"setting {key} in {file_name} takes a value or a list of them, and holds a {type(wrong).__name__}"
            )
        raise ConfigError(message, hint=f"lines look like `{key}: {SETTINGS[name].metavar}`")
    texts = [_yaml_word(item) for item in items]
    return texts if SETTINGS[name].is_list else texts[0]


def _yaml_word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _of_group(environment: Mapping[str, str], own: Sequence[_Row]) -> list[_Row]:
    """Return the values from LeaderWorkerSet's variables. Rank and leader are left out if `nodes` was set to another
    size than the group's: then the pods of the group do not serve together."""
    rows: list[_Row] = [
        (name, environment[key], f"variable {key}") for name, key in _GROUP.items() if environment.get(key)
    ]
    size = environment.get(_GROUP["nodes"]) or "1"
    nodes = next((text for name, text, _ in reversed(own) if name == "nodes"), size)
    return rows if nodes == size != "1" else [row for row in rows if row[0] == "nodes"]


def _from_environment(environment: Mapping[str, str]) -> list[_Row]:
    rows: list[_Row] = []
    names = {setting.variable: name for name, setting in SETTINGS.items()}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or _is_service_link(variable, environment[variable]):
            continue
        _known(variable, "environment", variable, tuple(names))
        if environment[variable] != "":  # compose passes an unset `${X:-}` as an empty variable
            rows.append((names[variable], environment[variable], f"variable {variable}"))
    return rows


def _is_service_link(variable: str, value: str) -> bool:
    """Kubernetes gives every pod APPLIANCE_PORT=tcp://… and more when a Service is called `appliance`."""
    is_address = variable == "APPLIANCE_PORT" and "://" in value
    return is_address or bool(re.fullmatch(r"APPLIANCE_(SERVICE_.+|PORT_\d+_.+)", variable))


# Names under which other products take their key. Ours is a file, because `docker inspect` shows variables.
_KEY_NAMES = frozenset({"api_key", "apikey", "key", "api_keys", "token", "auth_token"})
_KEY_HINT = (
    "the key is a file: mount yours as secrets/api_key of the volume, or let the first start create one; "
    "`appliance key` shows it, and `auth: off` (APPLIANCE_AUTH=off) asks for none"
)


def _known(name: str, where: str, shown: str, names: tuple[str, ...]) -> str:
    if name in names:
        return name
    message = f"unknown setting in {where}: {shown}"
    own = name.removeprefix(PREFIX)  # all variables have the prefix: with it every name would be similar to every other
    if own.lower() in _KEY_NAMES:
        raise ConfigError(message, hint=_KEY_HINT)
    near = difflib.get_close_matches(own, [each.removeprefix(PREFIX) for each in names], 1, cutoff=0.72)
    found = next((each for each in names if near and each.removeprefix(PREFIX) == near[0]), None)
    raise ConfigError(message, hint=f"perhaps you meant '{found}'" if found else f"known are {', '.join(names)}")


def _parsed(name: str, text: Texts, source: str) -> Any:  # noqa: ANN401
    if not isinstance(text, str):
        return tuple(word for each in text for word in _parsed(name, each, source))
    try:
        return SETTINGS[name].parse(text)
    except ValueError as problem:
        message = f"setting {name} {problem}: '{printable(text)}' ({source})"
        raise ConfigError(
            message, hint=f"{SETTINGS[name].flag} {SETTINGS[name].metavar}: {SETTINGS[name].help}"
        ) from None
