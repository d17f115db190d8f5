"""Environment variables of vLLM and its libraries that a user set for the container. Pure.

They are passed on, reported as not passed on, or refused if they contradict the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from appliance.errors import ConfigError
from appliance.plan.parts.choice import Choice
from appliance.settings import Settings

PREFIX = "VLLM_"
LOGGING = "VLLM_LOGGING_"
LOG_IS_READ = "the log is read by the appliance"
NETWORK = ("NCCL_", "GLOO_", "UCX_")  # libraries that transfer data between ranks
LIBRARIES = ("FLASHINFER_", "OMP_", "PYTORCH_", "TORCH", "TRITON_")
SOURCE = "environment of the container"
# Variables that contradict what the appliance promises: why, and what to do instead.
REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType({
    "VLLM_SERVER_DEV_MODE": ("it opens routes that run any code", "take it out"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": (
        "a context above the native one gives wrong answers without YaRN", "use --ctx-size N --rope-scaling yarn"
    ),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": ("an engine that died would look alive", "take it out"),
    "VLLM_ENABLE_STARTUP_PLAN": (
        "its key leaves out the utilization, so a value of another plan would be applied", "profiles do the same"
    ),
    "VLLM_CPU_KVCACHE_SPACE": (
        "it counts whole GiB and beats the bytes of the plan", 'use --engine-arg "--kv-cache-memory-bytes N"'
    ),
    "VLLM_PP_LAYER_PARTITION": (
        "the plan splits layers by memory", 'use --engine-arg "--pipeline-parallel-size N"'
    ),
    "VLLM_ATTENTION_BACKEND": ("the flag says the same", 'use --engine-arg "--attention-backend NAME"'),
})  # fmt: skip
# Variables that the appliance sets itself, with the reason. A user's value is reported and not passed on.
KEPT: Mapping[str, str] = MappingProxyType({
    "VLLM_API_KEY": "the gateway asks for the key, the engine listens on a private socket",
    "VLLM_CACHE_ROOT": "caches lie on the volume, one folder for each build",
    "VLLM_RPC_BASE_PATH": "sockets lie in the runtime folder",
    "VLLM_HOST_IP": "127.0.0.1, and in a group the host's address towards its leader",
    "VLLM_CONFIGURE_LOGGING": LOG_IS_READ,
    "VLLM_DO_NOT_TRACK": "no usage data is sent",
    "VLLM_NO_USAGE_STATS": "no usage data is sent",
    "VLLM_PORT": "the engine listens on a private socket",
    "VLLM_USE_RUST_FRONTEND": "the appliance knows routes, log and endings of the Python frontend only",
})  # fmt: skip


def own_variables(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return the user's variables that are passed on to the engine. Raises ConfigError (10) for one of REFUSED that is
    set to anything but 0 or false.

    In a group of hosts NETWORK variables are not in the plan, since each host has its own.
    """
    prefixes = PREFIX if settings.nodes > 1 else (PREFIX, *NETWORK)
    found = _set(settings, prefixes)
    for name in sorted(REFUSED.keys() & found.keys()):
        why, instead = REFUSED[name]
        if found[name].strip().lower() not in ("0", "false"):
            message = f"variable {name} contradicts the plan: '{found[name]}' ({SOURCE}): {why}"
            raise ConfigError(message, hint=instead)
    return tuple(sorted((name, value) for name, value in found.items() if not _why_kept(name) and name not in REFUSED))


def variable_choices(settings: Settings, build_id: str) -> tuple[Choice, ...]:
    """Return one choice for all variables that are passed on, and one for each that is not."""
    passed = ", ".join(f"{name}={value}" for name, value in own_variables(settings))
    own = Choice(name="variables", value=passed, reason="of the engine, passed on as they are", source=SOURCE)
    return (*((own,) if passed else ()), *_of_the_group(settings), *_not_passed(settings, build_id))


def _of_the_group(settings: Settings) -> Iterator[Choice]:
    if settings.nodes > 1 and (found := _set(settings, NETWORK)):
        why = "of this host's network: passed on here; every host has its own"
        yield Choice(name="network", value=", ".join(sorted(found)), reason=why, source=SOURCE)


def _not_passed(settings: Settings, build_id: str) -> Iterator[Choice]:
    """Yield a choice for each variable that is not passed on. Cache folders that the image itself sets are left out,
    since no user asked for them."""
    caches = f"{settings.data_dir / 'cache' / build_id}/"
    for name, value in sorted(_set(settings, (PREFIX, *LIBRARIES)).items()):
        why = _why_kept(name) or ("it is off without it" if name in REFUSED else None)
        if not name.startswith(PREFIX):
            why = "variable of a library: only variables of vLLM and of its network are passed on"
        if why and not value.startswith(caches):
            yield Choice(name=name.lower(), value="not passed on", reason=why, source=SOURCE, is_refusal=True)


def _why_kept(name: str) -> str | None:
    return LOG_IS_READ if name.startswith(LOGGING) else KEPT.get(name)


def _set(settings: Settings, prefixes: str | tuple[str, ...]) -> dict[str, str]:
    """Return the variables that are set. An empty value counts as not set: compose passes on unset variables as
    empty."""
    return {name: value for name, value in settings.environment.items() if name.startswith(prefixes) and value}
