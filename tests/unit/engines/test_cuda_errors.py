"""cuda_errors.yaml: by number, name and text, as CUDA and what stands on it print them."""

from __future__ import annotations

import pytest

from appliance.engines.cuda_errors import GROUPS, CudaError, find_cuda_error, load_cuda_errors
from appliance.errors import DriverTooOldError, EngineError, GpuFaultError, GpuUnusableError, NoKernelError

ERRORS = load_cuda_errors()
SAID = (
    "CUDA error: {text}",
    "ggml_cuda_init: failed to initialize CUDA: {text}",
    "allocating 10.00 MiB on device 0: cudaMalloc failed: {text}",
    "torch.AcceleratorError: CUDA error: {text}",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions? Error {number}: {text}",
    "RuntimeError: CUDART error: {text}",
    "RuntimeError: Triton Error [CUDA]: {text}",
    "x:1:1 [0] init.cc:87 NCCL WARN Cuda failure {number} '{text}'",
    "CUDA error: a text of another release\nSearch for `{name}' in https://docs.nvidia.com/",
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_an_error_is_known_in_each_wording(error: CudaError) -> None:
    for words in SAID:
        said = words.format(text=error.text, number=error.number, name=error.name)
        found = find_cuda_error(said)
        assert found, said
        assert (found.text.lower(), found.kind) == (error.text.lower(), error.kind)
    assert find_cuda_error(f"RuntimeError: CUDA error: {error.name} when calling `f(handle)`") == error
    if error.driver_name:
        assert find_cuda_error(f"RuntimeError: CUDA driver error: {error.driver_name}") == error


def test_none_of_them_is_called_memory() -> None:
    assert len({each.name for each in ERRORS}) == len(ERRORS)
    assert {each.kind for each in ERRORS} == set(GROUPS.values())
    kinds = {each.kind for each in ERRORS}
    assert not any(kind.exit_code in (41, 42) for kind in kinds)
    assert find_cuda_error("CUDA error: out of memory") is None
    assert find_cuda_error("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://x") is None


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (35, DriverTooOldError, "update the NVIDIA driver"),
        (46, GpuUnusableError, "nvidia-smi -c DEFAULT"),
        (100, GpuUnusableError, "--gpus"),
        (209, NoKernelError, "built for this GPU"),
        (214, GpuUnusableError, "nvidia-smi -q -d ECC"),
        (700, GpuFaultError, "dmesg | grep Xid"),
        (719, GpuFaultError, "dmesg | grep Xid"),
        (802, GpuUnusableError, "nvidia-fabricmanager"),
        (803, DriverTooOldError, "restart the host"),
        (804, DriverTooOldError, "older CUDA release"),
        (999, GpuUnusableError, "create the container anew"),
    ],
)
def test_each_has_its_class_and_remedy(number: int, kind: type[Exception], remedy: str) -> None:
    error = next(each for each in ERRORS if each.number == number)
    assert error.kind is kind
    assert remedy in error.remedy


@pytest.mark.parametrize(
    "words",
    [
        "failed to open /usr/local/cuda/x: operation not permitted",
        "mbind: Operation not permitted",
        "io_uring_queue_init failed: operation not permitted",
        "CUDA error: the resource allocation failed",
        "CUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA graphs are captured for batch sizes (100), (200)",
        "the process that used CUDA ended with exit code 3",
        "unknown error",
        "error 999",
    ],
)
def test_what_is_no_error_of_cuda(words: str) -> None:
    assert find_cuda_error(words) is None


def test_another_plan_may_do_without_a_kernel_that_failed_and_not_without_the_gpu() -> None:
    assert issubclass(GpuFaultError, EngineError)
    assert not issubclass(GpuUnusableError, EngineError)
