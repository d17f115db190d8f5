"""What vLLM says of itself, as JSON: run with vLLM's own Python while an image is built, never imported.

    /opt/vllm/bin/python introspect.py OUT.json

Its packages are not the appliance's, so nothing of ours is imported here. The answer goes to a file, since vLLM logs on
standard output. A part that cannot be read without a GPU is null, never a guess.
"""

from __future__ import annotations

import json
import platform
import sys
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, get_args

# A backend is asked about each of NVIDIA's chips. Those of other makers say yes to all of them, so they are left out.
SMS = ("75", "80", "86", "87", "89", "90", "100", "103", "110", "120", "121")
FOREIGN = ("ROCM_", "XPU_")
ON_CPU = ("CPU_", "AMX_")
# Of its packages those that compute, compile or read a model.
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
    """A build for CUDA is asked as one, of which no GPU is known: where it finds none it takes itself for a build of no
    platform, which has no parser, and where it finds one some of its answers would be of that one."""
    if import_module("torch").version.cuda is None:
        return
    platforms = import_module("vllm.platforms")
    platforms.builtin_platform_plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"
    # Else torch is asked, which ends with an error on any machine without a driver.
    type(platforms.current_platform).get_device_capability = classmethod(lambda *_, **__: None)


def version_facts() -> dict[str, str]:
    """As the build's own file says it; the commit is empty where that names none, as in a third party's wheel."""
    found = import_module("vllm._version")
    return {"version": str(found.__version__), "commit": str(found.__commit_id__ or "").removeprefix("g")}


def serve_parser() -> Any:  # noqa: ANN401 - vLLM's own class
    """The one that `vllm serve` parses with, made as its command line makes it."""
    parser_class = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    subparsers = parser_class(prog="vllm").add_subparsers(dest="subparser")
    (command,) = import_module("vllm.entrypoints.cli.serve").cmd_init()
    return command.subparser_init(subparsers)


def parser_facts(parser: Any) -> dict[str, Any]:  # noqa: ANN401
    """Long flags, and the values of those that list them."""
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
    """In the order of vLLM's own list, without those that have no class here."""
    members = import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
    return [member for member in members if member.value and not member.name.startswith(FOREIGN)]


def attention_backend(member: Any) -> dict[str, Any]:  # noqa: ANN401
    """`sms`: the chips that it says it runs on; none for one of the CPU."""
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
    """Python, and of `LIBRARIES` those that are installed."""
    found = [("python", platform.python_version())]
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found.append((name, metadata.version(name)))
    return found


def registered(module: str, manager: str) -> list[str]:
    return sorted(str(name) for name in getattr(import_module(module), manager).list_registered())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
