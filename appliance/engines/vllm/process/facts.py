"""EngineFacts of vLLM: its own Python is asked once, while an image is built.

Asking imports the whole engine (10 s of CPU time), and so does `vllm serve --help`: nothing of it is done at a start.
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
PYTHON = "python"  # beside it: Python with vLLM's packages and none of ours
INTROSPECT = Path(__file__).with_name("introspect.py")
TIMEOUT_S = 600.0  # 10 s of CPU time with byte code; a cold disk and a busy machine take minutes


def read_facts(binary: Path, kv_pairs: str) -> EngineFacts:
    """`binary` is bin/vllm. Raises EngineLibraryError (44) when vLLM cannot be imported, EngineArgumentsError (40) when
    its answer is not understood."""
    if kv_pairs:
        message = f"this engine has no pairs of KV types: {kv_pairs}, given by --kv-pairs"
        raise EngineArgumentsError(message, hint="leave --kv-pairs out")
    # There something stands in for the driver's library. On a user's machine this variable may name any folder.
    return query_facts(binary, library_path=process_environment().get("LD_LIBRARY_PATH"))


def query_facts(binary: Path, *, library_path: str | None = None) -> EngineFacts:
    """Likewise. `library_path` is where it looks for libraries beyond the loader's own places."""
    with tempfile.TemporaryDirectory(prefix="vllm-facts-") as folder:
        answer = Path(folder) / "facts.json"
        _ask(binary.with_name(PYTHON), answer, library_path)
        return parse_facts(answer.read_text(encoding="utf-8"))


def _ask(python: Path, answer: Path, library_path: str | None) -> None:
    argv = (str(python), str(INTROSPECT), str(answer))
    try:
        done = run(argv, timeout_s=TIMEOUT_S, environment=_environment(answer.parent, library_path))
    except (OSError, RunTimeout) as error:
        message = f"vLLM's Python cannot be asked: {python}: {error}"
        raise EngineLibraryError(message, hint="the image is damaged; build it again") from error
    if done.returncode != 0 or not answer.is_file():
        said = done.stderr.strip()[-500:]
        message = f"vLLM does not say what it can do: {python}: exit code {done.returncode}: {said}"
        raise EngineLibraryError(message, hint="a library is missing, or vLLM has moved what introspect.py reads")


def _environment(folder: Path, library_path: str | None) -> Mapping[str, str]:
    """Nothing that the engine writes on import stays: all its caches follow HOME or these."""
    caches = ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
    return {
        **({"LD_LIBRARY_PATH": library_path} if library_path else {}),
        "PATH": os.defpath,
        **dict.fromkeys((*caches, "XDG_CONFIG_HOME"), str(folder)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",  # else the folder of the script, this one, would be searched for modules
        "VLLM_NO_USAGE_STATS": "1",
    }


def parse_facts(text: str) -> EngineFacts:
    """What introspect.py writes. EngineArgumentsError (40) for anything else, and for an answer that names no flag."""
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
