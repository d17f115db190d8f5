"""Tries the compiler that cuBLAS opens at run time, in a finished image. It needs no GPU to compile for one."""

from __future__ import annotations

from collections.abc import Sequence

from images import docker
from images.matrix.engines import LLAMA

FOLDER = LLAMA.folder
# Found as cuBLAS finds it: beside itself. Its second half is looked for by the loader alone, which is what fails first.
SCRIPT = """\
import ctypes, sys
library, *chips = sys.argv[1:]
nvrtc = ctypes.CDLL(library)
source = b'extern "C" __global__ void twice(float *x) { x[threadIdx.x] = __fmaf_rn(x[threadIdx.x], 2.0f, 0.0f); }'
def text(query, program):
    size = ctypes.c_size_t()
    getattr(nvrtc, query + "Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value + 1)
    getattr(nvrtc, query)(program, data)
    return data.raw[:size.value]
for chip in chips:
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"twice.cu", 0, None, None)
    if nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(b"-arch=sm_" + chip.encode())):
        sys.exit("SM " + chip + ": " + " ".join(text("nvrtcGetProgramLog", program).decode(errors="replace").split()))
    if not text("nvrtcGetCUBIN", program).startswith(b"\\x7fELF"):
        sys.exit("SM " + chip + ": what it made is no machine code")
    print("SM " + chip)
"""


def query(engine: docker.Engine, image: str, library: str, forms: Sequence[str]) -> docker.Finished:
    """Compiles for each chip in a container of the image: exit 0 and a line for each, or the reason."""
    return engine.run(image, ("-I", "-c", SCRIPT, f"{FOLDER}/{library}", *forms), entrypoint=("python3",))
