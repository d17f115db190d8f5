"""Tells which lines of llama.cpp's log are errors. All its programs mark lines the same way."""

from __future__ import annotations

import re

# Minutes.seconds.milliseconds.microseconds, then D, I, W or E. If a line has the mark, the mark decides: an info line
# may say "failed to" without being the cause. Lines of other libraries have no mark.
_MARKED = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} ([A-Z]) ")
_ERROR = re.compile(
    r"\bERROR\b|\bFATAL\b|\bGGML_ASSERT\b|^\w*Error\b|(?i:^error\b|\berror:|\bfailed to\b|\bterminate called\b"
    r"|\bCUDA error\b|\bout of memory\b|\bIllegal instruction\b|\bSegmentation fault\b"
    r"|\bcannot open shared object file\b)"
)
# Failures that the engine recovers from: it continues in another way, so the line is not the cause of a later ending,
# even if it is marked as an error. The last pattern finds warnings that lost their mark.
_MENDED = re.compile(
    # ggml/src/ggml-cuda/ggml-cuda.cu ggml_cuda_host_malloc, ggml_backend_cuda_register_host_buffer: pageable memory
    r"(?i:\b(?:pinned|page-locked) (?:host )?(?:memory|buffer)\b)|\bcudaHost(?:Alloc|Register)\b|\bcudaMallocHost\b"
    # src/llama-mmap.cpp llama_mlock::impl: the weights may be swapped out
    r"|\b(?:mlock|mlockall|munlock|VirtualLock)\b|\bRLIMIT_MEMLOCK\b"
    # common/fit.cpp common_fit_params, server-context.cpp load_model: the plan's own arguments hold
    r"|fit(?:ting)? params\b|failed to measure the memory of|failed to get memory usage of mmproj"
    # tools/server/server-task.cpp server_prompt_cache: the prompt is read again
    r"|for prompt cache state\b|failed to restore state\b"
    # src/llama-model-loader.cpp load_all_data, ggml/src/ggml-backend.cpp ggml_backend_sched_alloc_splits
    r"|for async uploads\b|failed to allocate graph, reserving\b"
    # ggml/src/ggml-cuda/allreduce.cu ggml_cuda_ar_pipeline_init: copies through the host
    r"|\balloc for (?:arrival ring|staging|large staging) failed|cudaMalloc for copy scratch failed"
    r"|\b(?i:fall(?:ing|s)? ?back|fallback to|retrying|skipping|ignoring|ignored)\b"
    r"|^(?i:warning|warn)\b"
)


def is_mended(line: str) -> bool:
    """Return True if the engine recovers by itself from what this line says."""
    return _MENDED.search(line) is not None


def is_error(line: str) -> bool:
    """Return True if the line reports an error: by its mark, or by its words if it has none."""
    if is_mended(line):
        return False
    if marked := _MARKED.match(line):
        return marked[1] == "E"
    return _ERROR.search(line) is not None


def may_be_error(line: str) -> bool:
    """Return True if the line may be the cause of an ending: it is marked as an error, or has no mark."""
    marked = _MARKED.match(line)
    return marked is None or marked[1] == "E"
