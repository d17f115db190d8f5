"""Which libraries may be missing from an image, and what is said of those that are."""

from __future__ import annotations

import pytest

from images import libraries
from images.libraries import Unresolved

TORCHCODEC = "/opt/vllm/lib/torchcodec/libtorchcodec_core4.so"


def test_lines_of_the_loader_are_read() -> None:
    found = libraries.parse(["libcuda.so.1 /opt/llama/libggml-cuda.so", f"libavutil.so.56 {TORCHCODEC}"])
    assert found == (
        Unresolved(library="libcuda.so.1", file="/opt/llama/libggml-cuda.so"),
        Unresolved(library="libavutil.so.56", file=TORCHCODEC),
    )


@pytest.mark.parametrize("line", ["", "libcuda.so.1", "sh: ldd: not found"])
def test_any_other_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="no name and path"):
        libraries.parse([line])


@pytest.mark.parametrize(
    ("library", "file"),
    [
        ("libcuda.so.1", "/opt/llama/libggml-cuda.so"),
        ("libavutil.so.56", TORCHCODEC),
        ("libmlx5.so.1", "/opt/vllm/lib/nvidia/nvshmem/lib/nvshmem_transport_ibgda.so.3"),
    ],
)
def test_what_is_known_to_be_absent_is_no_fault_and_is_named(library: str, file: str) -> None:
    found = [Unresolved(library=library, file=file)]
    assert libraries.faults(found, (), libraries.load_known()) == []
    assert library.partition(".so")[0] in libraries.describe(found, ())


@pytest.mark.parametrize(
    ("library", "file"),
    [
        ("libcuda.so.2", "/opt/llama/libggml-cuda.so"),
        ("libavutil.so.56", "/opt/vllm/lib/vllm/_C.abi3.so"),
        ("libgomp.so.1", "/opt/llama/llama-server"),
    ],
)
def test_anything_else_is_a_fault(library: str, file: str) -> None:
    found = [Unresolved(library=library, file=file)]
    assert libraries.faults(found, (), libraries.load_known()) == [f"{file} needs {library}"]


def test_what_is_in_the_image_under_another_path_is_loaded_by_its_process_first() -> None:
    found = [Unresolved(library="libtorch.so", file="/opt/vllm/lib/vllm/_C.abi3.so")]
    assert libraries.faults(found, {"libtorch.so"}, ()) == []
    assert libraries.describe(found, {"libtorch.so"}) == "loaded by others first: 1"
    assert libraries.describe((), ()) == "all are found"
