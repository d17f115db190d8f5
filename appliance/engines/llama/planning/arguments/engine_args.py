"""Arguments that a user passes to llama-server. They are refused if this binary lacks them or the plan decides them.
Pure."""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from appliance.errors import ConfigError
from appliance.image_facts import EngineFacts
from appliance.plan.parts.choice import Choice
from appliance.settings import SETTINGS, Settings, is_flag

# Flags that the plan sets, in all their spellings, by the setting that a user has to set instead.
_SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "alias": ("-a", "--alias"),
    "auth": ("--api-key", "--api-key-file"),
    "cache_disk_mib": ("--cache-disk", "--cache-disk-mib", "--cache-disk-key", "--cache-disk-stop-ms"),
    "cache_ram_mib": (
        "-cram", "--cache-ram", "--cache-idle-slots", "--no-cache-idle-slots", "-sps", "--slot-prompt-similarity",
    ),
    "chat_template_file": ("--chat-template-file",),
    "ctx_size": ("-c", "--ctx-size"),
    "devices": ("-dev", "--device", "-mg", "--main-gpu", "-ts", "--tensor-split", "-sm", "--split-mode"),
    "draft_model": (
        "-md", "--model-draft", "--spec-draft-model", "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf",
    ),
    "draft_tokens": (
        "--spec-draft-n-max", "--draft", "--draft-n", "--draft-max", "--spec-ngram-mod-n-max",
    ),
    "gpu_layers": ("-ngl", "--gpu-layers", "--n-gpu-layers"),
    "host": ("--host", "--reuse-port"),
    "kv_type": ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"),
    "load_mode": (
        "-lm", "--load-mode", "--mlock", "--mmap", "--no-mmap", "-dio", "--direct-io", "-ndio", "--no-direct-io",
    ),
    "lora": ("--lora", "--lora-scaled", "--lora-init-without-apply"),
    "mmproj": (
        "-mm", "--mmproj", "-mmu", "--mmproj-url", "--mmproj-auto", "--no-mmproj", "--no-mmproj-auto",
        "--mmproj-offload", "--no-mmproj-offload", "-mmdev", "--mmproj-device",
    ),
    "model": (
        "-m", "--model", "-mu", "--model-url", "-dr", "--docker-repo", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file",
        "-hft", "--hf-token", "--models-dir", "--models-preset", "--models-max", "--models-autoload",
        "--no-models-autoload", "-cl", "--cache-list",
    ),
    "moe_slots": ("--moe-slots", "--moe-rates", "--moe-uses"),
    "numa": ("--numa",),
    "n_cpu_moe": ("-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe"),
    "parallel": (
        "-np", "--parallel", "-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified", "--kv-unified-per-slot",
    ),
    "pooling": ("--pooling", "--embedding", "--embeddings", "--rerank", "--reranking"),
    "port": ("--port",),
    "reasoning_format": ("--reasoning-format",),
    "reserve_mib": ("-fitt", "--fit-target"),
    "rope_scaling": (
        "--rope-scaling", "--rope-scale", "--yarn-orig-ctx", "--rope-freq-scale", "--rope-freq-base",
    ),
    "speculation": (
        "--spec-type", "--spec-default", "--spec-draft-n-min", "--draft-min", "--draft-n-min",
        "--spec-ngram-mod-n-min",
        "-ctkd", "--cache-type-k-draft", "--spec-draft-type-k", "-ctvd", "--cache-type-v-draft", "--spec-draft-type-v",
        "-devd", "--device-draft", "--spec-draft-device", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft",
        "--spec-draft-ngl",
    ),
    "thinking": ("-rea", "--reasoning"),
    "threads": (
        "-t", "--threads", "-tb", "--threads-batch", "-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict",
        "-Cb", "--cpu-mask-batch", "-Crb", "--cpu-range-batch", "--cpu-strict-batch",
    ),
    "trace_experts": ("--moe-trace",),
    "ubatch": ("-b", "--batch-size", "-ub", "--ubatch-size"),
})  # fmt: skip
# Flags that are refused and have no setting, by the reason.
_REASONS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "the plan decides it by model and machine": (
        "-fa", "--flash-attn", "-fit", "--fit", "-fitc", "--fit-ctx", "-fitp", "--fit-print", "-ctxcp",
        "--ctx-checkpoints", "--swa-checkpoints", "--swa-full",
    ),
    "raising the priority needs a capability that a hardened container has dropped": (
        "--prio", "--prio-batch", "--prio-draft", "--spec-draft-prio", "--prio-batch-draft", "--spec-draft-prio-batch",
    ),
    "the appliance reads the engine's log": (
        "-lv", "--verbosity", "--log-verbosity", "-v", "--verbose", "--log-verbose", "--log-disable", "--log-colors",
        "--log-prefix", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps", "--log-jsonl", "--no-log-jsonl",
    ),
    "the appliance listens for clients, and speaks to the engine on a socket of its own": (
        "--ssl-key-file", "--ssl-cert-file", "--api-prefix", "--path", "--ui", "--webui", "--no-ui", "--no-webui",
        "--slots", "--no-slots", "--offline",
    ),
    "the engine would print it and end": (
        "-h", "--help", "--usage", "--version", "--license", "--list-devices", "--completion-bash",
    ),
})  # fmt: skip
# Flags that change memory or speed in ways that the plan's figures do not count.
NOT_COUNTED = frozenset({
    "-cb", "-kvo", "-nkvo", "-nocb", "-nr", "-ot", "--cpu-ffn", "--kv-offload", "--n-cpu-ffn", "-ncffn", "--no-host",
    "--no-kv-offload", "--no-op-offload", "--no-repack", "--op-offload", "--override-kv", "--override-tensor",
    "--moe-policy", "--moe-overlap", "--no-moe-overlap",
    "--repack", "--control-vector", "--control-vector-scaled", "-lzm", "--lazy-mode", "--rpc",
})  # fmt: skip
OWNED: Mapping[str, str] = MappingProxyType({flag: name for name, flags in _SETTINGS.items() for flag in flags})
UNOFFERED: Mapping[str, str] = MappingProxyType({flag: why for why, flags in _REASONS.items() for flag in flags})
# `--gpt-oss-20b-default`, `--fim-qwen-7b-spec`: they fetch a model and set its context, batch and port.
_PRESET = re.compile(r"--.+-(default|spec)")
# Flags that a user may pass unless the setting named here is set.
_BESIDE: Mapping[str, str] = MappingProxyType({"--chat-template": "chat_template_file"})


def owner_of(flag: str, settings: Settings) -> str | None:
    """Return the setting to use instead of a flag; None if the user may pass the flag."""
    beside = _BESIDE.get(flag)
    if beside is not None and getattr(settings, beside) is not None:
        return beside
    return OWNED.get(flag, "model" if _PRESET.fullmatch(flag) else None)


def check_engine_args(settings: Settings, engine: EngineFacts) -> None:
    """Raise ConfigError for a flag that this binary lacks, or that a user must not pass."""
    for flag, values in grouped(settings.engine_arg):
        source = settings.sources["engine_arg"]
        if flag not in engine.flags:
            near = difflib.get_close_matches(flag, engine.flags, 3)
            message = f"setting engine_arg holds a flag that this engine has not: {flag} ({source})"
            hint = f"perhaps you meant {' or '.join(near)}" if near else f"it is build {engine.build} of llama.cpp"
            raise ConfigError(message, hint=hint)
        if name := owner_of(flag, settings):
            message = f"setting engine_arg holds a flag that the setting {name} stands for: {flag} ({source})"
            raise ConfigError(message, hint=f"use {SETTINGS[name].flag} {SETTINGS[name].metavar}")
        if flag in UNOFFERED:
            message = f"setting engine_arg holds a flag that cannot be given: {flag} ({source}): {UNOFFERED[flag]}"
            raise ConfigError(message, hint="take it out")
        if flag == "--override-kv" and any(".context_length=" in value for value in values):
            message = f"setting engine_arg holds a key that the setting ctx_size stands for: {values[0]} ({source})"
            raise ConfigError(message, hint="use --ctx-size N --rope-scaling yarn")
        if flag == "--override-kv" and any(".expert_used_count=" in value for value in values):
            message = f"setting engine_arg holds a key that the setting experts_used stands for: {values[0]} ({source})"
            raise ConfigError(message, hint="use --experts-used N")


def grouped(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each flag with its values. The first word must be a flag."""
    starts = [at for at, word in enumerate(words) if is_flag(word)]
    for at, end in itertools.pairwise([*starts, len(words)]):
        yield words[at], tuple(words[at + 1 : end])


def engine_args_choice(settings: Settings) -> Choice | None:
    if not settings.engine_arg:
        return None
    unknown = [flag for flag, _ in grouped(settings.engine_arg) if flag in NOT_COUNTED]
    why = "passed to the engine as it is"
    if unknown:
        why += f"; the figures here are without {' and '.join(unknown)}"
    words = shlex.join(settings.engine_arg)
    return Choice(name="engine_arg", value=words, reason=why, source=settings.sources["engine_arg"])
