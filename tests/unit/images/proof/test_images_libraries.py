"""What the loader answers, which libraries may be missing from an image, and what is said of those that are."""

from __future__ import annotations

import pytest

from images.proof import libraries
from images.proof.libraries import Answers, Unresolved

VLLM = "/opt/vllm/lib"
TORCHCODEC = f"{VLLM}/torchcodec/libtorchcodec_core4.so"
KERNELS = f"{VLLM}/vllm/_C.abi3.so"
SERVER = "/opt/llama/llama-server"


def judged(file: str, library: str, *names: str, has_cuda: bool = True) -> list[str]:
    answers = Answers(asked=1, unresolved=(Unresolved(file=file, library=library),))
    return libraries.faults(answers, names, libraries.load_known(), has_cuda=has_cuda)


def test_the_script_s_lines_are_read_and_others_passed_over() -> None:
    lines = [
        "find: '/opt/x': Permission denied",
        f"needs\t{SERVER}\tlibgomp.so.1",
        f"version\t{KERNELS}\t{KERNELS}: /lib/libc.so.6: version `GLIBC_2.38' not found",
        "unread\t/opt/cut.so\texited with unknown exit code (135)",
        "static\t/opt/tool",
        "asked\t40",
        "asked\t2",
    ]
    found = libraries.parse(lines)
    assert (found.asked, found.static) == (42, ("/opt/tool",))
    assert found.unresolved == (Unresolved(file=SERVER, library="libgomp.so.1"),)
    assert len(found.faults) == 2
    assert "GLIBC_2.38" in found.faults[0]


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/opt/llama/libggml-cuda.so", "libcuda.so.1"),
        (TORCHCODEC, "libavutil.so.56"),
        (f"{VLLM}/nvidia/nvshmem/lib/nvshmem_transport_ibgda.so.3", "libmlx5.so.1"),
    ],
)
def test_what_is_known_to_be_absent_is_no_fault_and_is_named(file: str, library: str) -> None:
    assert judged(file, library) == []
    answers = Answers(asked=3, unresolved=(Unresolved(file=file, library=library),))
    assert libraries.describe(answers, ()) == f"of 3 files; known to be absent: {library.partition('.so')[0]}"


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/opt/llama/libggml-cuda.so", "libcuda.so.2"),
        (KERNELS, "libavutil.so.56"),
        (SERVER, "libgomp.so.1"),
        (SERVER, "libtbb.so.12"),
    ],
)
def test_anything_else_is_a_fault(file: str, library: str) -> None:
    assert judged(file, library) == [f"{library}, needed by {file}"]


def test_the_driver_s_library_is_nothing_that_a_cpu_image_may_need() -> None:
    assert judged("/opt/llama/libllama.so", "libcuda.so.1", has_cuda=False)


def test_what_torch_loads_must_be_in_the_image() -> None:
    assert judged(KERNELS, "libtorch.so", "libtorch.so") == []
    assert judged(KERNELS, "libtorch.so") == [f"libtorch.so, needed by {KERNELS}"]
    answers = Answers(asked=1, unresolved=(Unresolved(file=KERNELS, library="libtorch.so"),))
    assert libraries.describe(answers, {"libtorch.so"}) == "of 1 files; loaded by others first: 1"


def test_a_library_that_is_only_elsewhere_in_the_image_is_a_fault_where_nobody_loads_it_first() -> None:
    """Example: a backend has lost its run path. The file exists and is not found."""
    file = "/opt/llama/libggml-cuda.so"
    assert judged(file, "libcudart.so.13", "libcudart.so.13") == [f"libcudart.so.13, needed by {file}"]


def test_a_library_that_many_files_need_is_one_fault() -> None:
    lost = [("/opt/b", "libx.so.1"), ("/opt/a", "libx.so.1"), ("/opt/a", "liby.so.2")]
    answers = Answers(asked=2, unresolved=tuple(Unresolved(file=file, library=library) for file, library in lost))
    found = libraries.faults(answers, (), (), has_cuda=False)
    assert found == ["libx.so.1, needed by /opt/a and 1 more", "liby.so.2, needed by /opt/a"]


def test_what_the_loader_cannot_read_is_a_fault() -> None:
    answers = Answers(asked=1, faults=("/opt/cut.so: exit code 135",), static=("/opt/bin/tool", "/opt/zero.so"))
    found = libraries.faults(answers, (), (), has_cuda=False)
    assert found == ["/opt/cut.so: exit code 135", "/opt/zero.so: the loader takes it for no library"]
