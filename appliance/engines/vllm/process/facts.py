"""EngineFacts of vLLM, read once by vLLM's own Python while an image is built.

Reading them imports the whole engine (10 s of CPU time), as `vllm serve --help` does. So a start never does it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from appliance import documents
from appliance.errors import EngineArgumentsError, EngineLibraryError
from appliance.image_facts import EngineFacts
from appliance.run import RunTimeout, run
from appliance.settings import process_environment

BINARY = "vllm"
PYTHON = "python"  # in the same folder; it has vLLM's packages and none of ours
INTROSPECT = Path(__file__).with_name("introspect.py")
TIMEOUT_S = 600.0  # 10 s of CPU time with byte code; a cold disk and a busy machine take minutes


def read_facts(binary: Path, kv_pairs: str) -> EngineFacts:
    """Return the facts while an image is built. `binary` is bin/vllm. Raises EngineLibraryError (44) if vLLM cannot be
    imported, EngineArgumentsError (40) if its answer cannot be read."""
    if kv_pairs:
        message = f"this engine has no pairs of KV types: {kv_pairs}, given by --kv-pairs"
        raise EngineArgumentsError(message, hint="leave --kv-pairs out")
    # In a build, LD_LIBRARY_PATH names a stub of the driver's library. On a user's machine the variable is not read,
    # since it may name any folder.
    return query_facts(binary, library_path=process_environment().get("LD_LIBRARY_PATH"))


def query_facts(binary: Path, *, library_path: str | None = None) -> EngineFacts:
    """Return the facts; raises the errors of `read_facts`. `library_path` are further folders for the dynamic
    loader."""
    with tempfile.TemporaryDirectory(prefix="vllm-facts-") as folder:
        answer = Path(folder) / "facts.json"
        _ask(binary.with_name(PYTHON), answer, library_path)
        return parse_facts(answer.read_text(encoding="utf-8"))


def _ask(python: Path, answer: Path, library_path: str | None) -> None:
    argv = (str(python), str(INTROSPECT), str(answer))
    try:
        done = run(argv, timeout_s=TIMEOUT_S, environment=_environment(answer.parent, library_path))
    except (OSError, RunTimeout) as error:
        message = f"vLLM's Python cannot be run: {python}: {error}"
        raise EngineLibraryError(message, hint="the image is damaged; build it again") from error
    if done.returncode != 0 or not answer.is_file():
        said = done.stderr.strip()[-500:]
        message = f"vLLM's abilities cannot be read: {python}: exit code {done.returncode}: {said}"
        raise EngineLibraryError(message, hint="a library is missing, or vLLM has moved what introspect.py reads")


def _environment(folder: Path, library_path: str | None) -> Mapping[str, str]:
    """Return variables that send everything vLLM writes on import into `folder`, which is removed afterwards."""
    caches = ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
    return {
        **({"LD_LIBRARY_PATH": library_path} if library_path else {}),
        "PATH": os.defpath,
        **dict.fromkeys((*caches, "XDG_CONFIG_HOME"), str(folder)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",  # else Python would import modules from this folder, where the script is
        "VLLM_NO_USAGE_STATS": "1",
    }


def parse_facts(text: str) -> EngineFacts:
    """Read the file that introspect.py writes. Raises EngineArgumentsError (40) if it cannot be read, or if a field of
    `_NEVER_EMPTY` is empty."""
    try:
        facts = documents.read(EngineFacts, {**_UNASKED, **documents.load(text)})
    except ValueError as error:
        message = f"vLLM's answer is not understood: {error}"
        raise EngineArgumentsError(message, hint="see appliance/engines/vllm/process/introspect.py") from error
    missing = [name for name in _NEVER_EMPTY if not getattr(facts, name)]
    if missing:
        message = f"vLLM's answer names none of: {', '.join(missing)}"
        raise EngineArgumentsError(message, hint="see appliance/engines/vllm/process/introspect.py")
    return facts


_NEVER_EMPTY = ("version", "flags", "kv_types", "quantizations", "attention")
_UNASKED = {"build": 0, "kv_pairs": [], "backends": [], "split_modes": [], "cpu_variants": []}
