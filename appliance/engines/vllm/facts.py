"""EngineFacts of vLLM, from the files of its wheel: read once, while an image is built.

Flags and KV types are not asked yet: only `vllm serve --help=all` lists them, which imports the whole engine, and it is
not known whether that works on a machine without a GPU. They stay empty until the engine is served.
"""

from __future__ import annotations

import re
from pathlib import Path

from appliance.errors import EngineArgumentsError, EngineLibraryError
from appliance.image_facts import EngineFacts

BINARY = "vllm"
VERSION_FILE = Path("lib/vllm/_version.py")


def read_facts(binary: Path, kv_pairs: str) -> EngineFacts:
    """`binary` is bin/vllm beside lib/. Raises EngineLibraryError when the wheel is not there."""
    if kv_pairs:
        message = f"this engine has no pairs of KV types: {kv_pairs}, given by --kv-pairs"
        raise EngineArgumentsError(message, hint="leave --kv-pairs out")
    path = binary.parent.parent / VERSION_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        message = f"engine's wheel is not where its launcher expects it: {path}: {error.strerror}"
        raise EngineLibraryError(message, hint="the image is damaged; build it again") from error
    return parse_version(text)


def parse_version(text: str) -> EngineFacts:
    """The file that setuptools-scm writes into a wheel. EngineArgumentsError when it names no version or commit."""
    version = re.search(r"^__version__ = (?:version = )?'([^']+)'", text, re.MULTILINE)
    commit = re.search(r"^__commit_id__ = (?:commit_id = )?'g([0-9a-f]+)'", text, re.MULTILINE)
    if version is None or commit is None:
        message = f"engine names no version or no commit: {text[-200:]!r}"
        raise EngineArgumentsError(message, hint="its format has changed; see appliance/engines/vllm/facts.py")
    return EngineFacts(version=version[1], build=0, commit=commit[1], flags=(), kv_types=())
