"""`.devcontainer/<name>/`: a place to work on a cell, rendered from the cell's own parts and matrix. Pure.

It has one stage more than the cell: its toolchain, the engine's source with CMake's options, ccache, gdb and the
project's environment. `.devcontainer/check` compares a running one with its devcontainer.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from images.matrix import compat, render
from images.matrix.matrix import Cell

FOLDER = Path(".devcontainer")
USER = "developer"
HOME = Path("/home") / USER
ENGINE_DIR = HOME / "engine"
DATA_DIR = HOME / "data"
CCACHE_DIR = HOME / ".cache/ccache"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A command and what its output must hold; the versions that count are those of locks and toolkits.
TOOLS = {
    "ccache --version": "ccache version",
    "cmake --version": "cmake version",
    "curl --version": "curl",
    "g++ --version": "g++",
    "gdb --version": "GNU gdb",
    "git --version": "git version",
    "hadolint --version": "Haskell Dockerfile Linter",
    "make --version": "GNU Make",
    "mypy --version": "mypy",
    "ninja --version": "1.",
    "patch --version": "GNU patch",
    "python3 -c 'import sys; print(sys.prefix)'": "/opt/venv",
    "python3 -m images list --only llama-cpu": "llama-cpu",
    "pytest --version": "pytest",
    "ruff --version": "ruff",
    "zizmor --version": "zizmor",
}
EXTENSIONS = ("charliermarsh.ruff", "ms-python.debugpy", "ms-python.python", "ms-vscode.cpptools")


def files(root: Path, name: str, cell: Cell) -> dict[Path, str]:
    """Returns the files by path below the project. Raises MatrixError if the cell's template has no such stage."""
    folder = FOLDER / name
    return {
        folder / "Dockerfile": render.fill(cell, render.load_template(root, cell, "devcontainer"), _values(cell)),
        folder / "devcontainer.json": _configuration(cell),
    }


def _values(cell: Cell) -> dict[str, str]:
    cuda = [f"{_cuda_home(cell)}/bin"] if cell.toolkit else []
    return {
        # The command line of devcontainers looks at what FROM names before it builds, and knows this form of a default.
        "base_reference": f"${{BASE:-{cell.base.reference}}}",
        "developer_from": "nvcc" if cell.toolkit else "toolchain",
        "engine_dir": ENGINE_DIR.as_posix(),
        "home": HOME.as_posix(),
        "user": USER,
        "path": ":".join(("/opt/venv/bin", *cuda, SYSTEM_PATH)),
    }


def _configuration(cell: Cell) -> str:
    header = f"// DO NOT EDIT. Made from build_matrix.yaml and images/ci/devcontainer.py by: {render.RENDER_COMMAND}"
    return f"{header}\n{json.dumps(_described(cell), indent=2)}\n"


def _described(cell: Cell) -> dict[str, object]:
    return {
        "name": f"appliance: {cell.id}",
        "build": {
            "dockerfile": "Dockerfile",
            "context": "../..",
            "args": {"BASE": "${localEnv:BASE}"},
            # Behind a proxy that intercepts TLS; an empty file is no certificate.
            "options": ["--secret=id=ca,src=${localEnv:CA_BUNDLE:/dev/null}"],
        },
        **({"hostRequirements": {"gpu": "optional"}} if cell.toolkit else {}),
        "remoteUser": USER,
        "updateRemoteUserUID": True,
        "init": True,
        "capAdd": ["SYS_PTRACE"],  # a debugger joins an engine that the appliance started
        "securityOpt": ["no-new-privileges"],
        "containerEnv": _environment(cell),
        "mounts": [
            _volume(f"engine-{cell.id}-{cell.engine.commit_short}", ENGINE_DIR),
            _volume("ccache", CCACHE_DIR),
            _volume("data", DATA_DIR),
        ],
        # A volume that stays empty, or the folder of weights that this machine has: the appliance looks there.
        "runArgs": ["--volume=${localEnv:HF_HUB_CACHE:appliance-dev-huggingface}:/mnt/huggingface:ro"],
        "forwardPorts": [11435],
        "portsAttributes": {"11435": {"label": "appliance", "onAutoForward": "silent"}},
        "customizations": {
            "vscode": {"extensions": _extensions(cell), "settings": _settings()},
            "appliance": {"cell": cell.id, "tools": TOOLS | _own_tools(cell), "writable": _writable()},
        },
    }


def _environment(cell: Cell) -> dict[str, str]:
    """Returns the variables. CMake reads CUDAARCHS; people and scripts look for the other name."""
    own = {
        "CCACHE_DIR": CCACHE_DIR.as_posix(),
        "CCACHE_MAXSIZE": "4G",
        "ENGINE_CELL": cell.id,
        "ENGINE_DIR": ENGINE_DIR.as_posix(),
    }
    if not cell.toolkit:
        return own
    architectures = ";".join(f"{form}-real" for form in cell.forms)
    return {
        **own,
        "CMAKE_CUDA_ARCHITECTURES": architectures,
        "CUDAARCHS": architectures,
        "CUDA_HOME": _cuda_home(cell),
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }


def _cuda_home(cell: Cell) -> str:
    return render.TOOLKIT_PLACES[cell.toolkit.form]["cuda_home"] if cell.toolkit else ""


def _own_tools(cell: Cell) -> dict[str, str]:
    packages = f"/opt/venv/lib/python{compat.python_of(cell.base)}/site-packages"
    gates = {f"{packages}/nvidia/cu13/bin/cuobjdump --version": "NVIDIA"}  # where `images gate` looks for it
    return gates | ({"nvcc --version": f"release {cell.toolkit.cuda}"} if cell.toolkit else {})


def _volume(name: str, target: Path) -> str:
    return f"source=appliance-dev-{name},target={target.as_posix()},type=volume"


def _writable() -> list[str]:
    return [path.as_posix() for path in (ENGINE_DIR / "llama.cpp/CMakeLists.txt", ENGINE_DIR, CCACHE_DIR, DATA_DIR)]


def _extensions(cell: Cell) -> list[str]:
    return [*EXTENSIONS, *(["nvidia.nsight-vscode-edition"] if cell.toolkit else [])]


def _settings() -> dict[str, object]:
    return {
        "python.defaultInterpreterPath": "/opt/venv/bin/python",
        "python.testing.pytestArgs": ["tests/unit"],
        "python.testing.pytestEnabled": True,
        "files.watcherExclude": {f"{ENGINE_DIR.as_posix()}/**": True},
    }
