"""Script that writes vLLM's abilities as JSON. vLLM's own Python runs it while an image is built; it is never imported.

    /opt/vllm/bin/python introspect.py OUT.json

That Python lacks the appliance's packages, so this file imports none of them. The answer goes to a file, since vLLM
logs on standard output. A value that cannot be read without a GPU is null.
"""

from __future__ import annotations

import json
import platform
import sys
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, get_args

# Chips that each attention backend is asked about. Backends of other makers answer yes to all, so FOREIGN are left out.
SMS = ("75", "80", "86", "87", "89", "90", "100", "103", "110", "120", "121")
FOREIGN = ("ROCM_", "XPU_")
ON_CPU = ("CPU_", "AMX_")
# vLLM's packages that compute, compile or read a model.
LIBRARIES = ("torch", "triton", "flashinfer-python", "transformers", "tokenizers", "safetensors", "xgrammar")


def main(out: Path) -> None:
    settle_platform()
    found = {
        **version_facts(),
        **parser_facts(serve_parser()),
        "quantizations": quantizations(),
        "attention": [attention_backend(member) for member in attention_members()],
        "tool_parsers": registered("vllm.tool_parsers", "ToolParserManager"),
        "reasoning_parsers": registered("vllm.reasoning", "ReasoningParserManager"),
        "libraries": libraries(),
    }
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def settle_platform() -> None:
    """Make a CUDA build behave as one with an unknown GPU.

    Without a GPU vLLM would choose no platform, and then it has no parser. With a GPU some answers would hold only for
    that GPU.
    """
    if import_module("torch").version.cuda is None:
        return
    platforms = import_module("vllm.platforms")
    platforms.builtin_platform_plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"
    # Without this vLLM asks torch, which raises on a machine without a driver.
    type(platforms.current_platform).get_device_capability = classmethod(lambda *_, **__: None)


def version_facts() -> dict[str, str]:
    """Return version and commit from vLLM's `_version`. The commit is empty if the wheel names none, as third-party
    wheels do."""
    found = import_module("vllm._version")
    return {"version": str(found.__version__), "commit": str(found.__commit_id__ or "").removeprefix("g")}


def serve_parser() -> Any:  # noqa: ANN401 - vLLM's own class
    """Return the argument parser of `vllm serve`, made in the same way as vLLM's command line makes it."""
    parser_class = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    subparsers = parser_class(prog="vllm").add_subparsers(dest="subparser")
    (command,) = import_module("vllm.entrypoints.cli.serve").cmd_init()
    return command.subparser_init(subparsers)


def parser_facts(parser: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return all flags, the allowed values of flags that list them, and the KV cache types."""
    actions = [action for action in parser._actions if action.option_strings]
    return {
        "flags": sorted({flag for action in actions for flag in action.option_strings}),
        "choices": [
            {"flag": flag, "values": [str(choice) for choice in action.choices]}
            for action in actions
            for flag in action.option_strings
            if action.choices
        ],
        "kv_types": [str(name) for name in get_args(import_module("vllm.config.cache").CacheDType)],
    }


def quantizations() -> list[dict[str, str | None]]:
    package = import_module("vllm.model_executor.layers.quantization")
    return [
        {"name": str(name), "lowest_sm": lowest_sm(package.get_quantization_config, name)}
        for name in package.QUANTIZATION_METHODS
    ]


def lowest_sm(config_of: Any, name: str) -> str | None:  # noqa: ANN401
    try:
        return str(config_of(name).get_min_capability())
    except Exception as error:
        print(f"no lowest SM of {name}: {error!r}", file=sys.stderr)
        return None


def attention_members() -> list[Any]:
    """Return the attention backends in vLLM's order, without those of other makers or without a class in this build."""
    members = import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
    return [member for member in members if member.value and not member.name.startswith(FOREIGN)]


def attention_backend(member: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the abilities of one attention backend. `sms` are the chips that it says it supports; empty for backends
    of the CPU. All values are None if the backend cannot be imported here."""
    capability = import_module("vllm.platforms.interface").DeviceCapability
    asked = () if member.name.startswith(ON_CPU) else SMS
    try:
        backend = member.get_class()
        sms = [sm for sm in asked if backend.supports_compute_capability(capability(int(sm[:-1]), int(sm[-1])))]
        kv_types = [str(name) for name in backend.supported_kv_cache_dtypes]
        dtypes = [str(dtype).removeprefix("torch.") for dtype in backend.supported_dtypes]
        is_mla = bool(backend.is_mla())
    except Exception as error:
        print(f"attention backend {member.name} cannot be read here: {error!r}", file=sys.stderr)
        return {"name": member.name, "sms": None, "kv_types": None, "dtypes": None, "is_mla": None}
    return {"name": member.name, "sms": sms, "kv_types": kv_types, "dtypes": dtypes, "is_mla": is_mla}


def libraries() -> list[tuple[str, str]]:
    """Return name and version of Python and of the installed packages among LIBRARIES."""
    found = [("python", platform.python_version())]
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found.append((name, metadata.version(name)))
    return found


def registered(module: str, manager: str) -> list[str]:
    return sorted(str(name) for name in getattr(import_module(module), manager).list_registered())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
