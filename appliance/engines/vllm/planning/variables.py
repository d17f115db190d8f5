"""Variables of vLLM that a user set for the container: passed on, named, or refused where they contradict a plan.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from appliance.errors import ConfigError
from appliance.plan.choice import Choice
from appliance.settings import Settings

PREFIX = "VLLM_"
SOURCE = "environment of the container"
# Those that would undo what is promised, with what to do instead.
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
# Those that the appliance sets itself: named, and not passed on.
KEPT: Mapping[str, str] = MappingProxyType({
    "VLLM_API_KEY": "the gateway asks for the key, the engine listens on a private socket",
    "VLLM_CACHE_ROOT": "caches lie on the volume, one folder for each build",
    "VLLM_RPC_BASE_PATH": "sockets lie in the runtime folder",
    "VLLM_HOST_IP": "one machine: 127.0.0.1",
    "VLLM_LOGGING_COLOR": "the log is read by the appliance",
    "VLLM_LOGGING_CONFIG_PATH": "the log is read by the appliance",
    "VLLM_LOGGING_LEVEL": "the log is read by the appliance",
    "VLLM_CONFIGURE_LOGGING": "the log is read by the appliance",
    "VLLM_DO_NOT_TRACK": "nothing is sent to anybody",
    "VLLM_NO_USAGE_STATS": "nothing is sent to anybody",
    "VLLM_PORT": "the engine listens on a private socket",
})  # fmt: skip


def own_variables(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Of the engine, as the user set them, to be passed on. Raises ConfigError (10) for one of `REFUSED`."""
    found = {name: value for name, value in settings.environment.items() if name.startswith(PREFIX) and value}
    for name in sorted(REFUSED.keys() & found.keys()):
        why, instead = REFUSED[name]
        if found[name].strip().lower() not in ("0", "false"):
            message = f"variable {name} contradicts the plan: '{found[name]}' ({SOURCE}): {why}"
            raise ConfigError(message, hint=instead)
    return tuple(sorted((name, value) for name, value in found.items() if name not in KEPT and name not in REFUSED))


def variable_choices(settings: Settings, build_id: str) -> tuple[Choice, ...]:
    """One for all that are passed on, one for each that is not."""
    passed = ", ".join(f"{name}={value}" for name, value in own_variables(settings))
    images_own = {"VLLM_CACHE_ROOT": str(settings.data_dir / "cache" / build_id / "vllm")}  # that users never set
    named = [name for name in sorted(KEPT) if settings.environment.get(name) not in (None, "", images_own.get(name))]
    kept = (
        Choice(name=name.lower(), value="not passed on", reason=KEPT[name], source=SOURCE, is_refusal=True)
        for name in named
    )
    own = Choice(name="variables", value=passed, reason="of the engine, passed on as they are", source=SOURCE)
    return (*((own,) if passed else ()), *kept)
