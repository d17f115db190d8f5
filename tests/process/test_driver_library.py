"""The driver's library where only LD_LIBRARY_PATH finds it, with the real dynamic loader and libraries built for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from appliance.engines.llama.process.devices import query_devices
from appliance.engines.llama.process.server import gpu_environment
from appliance.probe.gpu.driver import CUDA, find
from appliance.run import run

OWN = "libown.so"  # of the engine, with a namesake in the driver's folder
MAIN = """
#include <stdio.h>
const char *driver(void), *own(void);
int main(void) { printf("%s %s\\n", driver(), own()); return 0; }
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`engine/llama-server`, linked as the real one is; `nvidia/lib64` as a device plugin mounts it."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler: the libraries are built from source")
    root = tmp_path_factory.mktemp("layout")
    engine, driver = root / "engine", root / "nvidia/lib64"
    engine.mkdir()
    driver.mkdir(parents=True)
    _library(engine / OWN, "own", "the engine's")
    _library(driver / OWN, "own", "somebody else's")
    _library(driver / CUDA, "driver", "driver")
    (root / "main.c").write_text(MAIN)
    _gcc(
        "-o", engine / "llama-server", root / "main.c", engine / OWN, driver / CUDA,
        "-Wl,--enable-new-dtags,-rpath,$ORIGIN",
    )  # fmt: skip
    return root


def _library(path: Path, function: str, says: str) -> None:
    source = path.with_suffix(".c")
    source.write_text(f'const char *{function}(void) {{ return "{says}"; }}\n')
    _gcc("-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, source)


def _gcc(*arguments: object) -> None:
    subprocess.run(["gcc", *map(str, arguments)], check=True, capture_output=True, text=True)


def test_the_engine_finds_the_driver_and_keeps_its_own_libraries(layout: Path, tmp_path: Path) -> None:
    engine, driver = layout / "engine", layout / "nvidia/lib64"
    program = (str(engine / "llama-server"),)
    untold = run(program, timeout_s=60, environment=gpu_environment(engine, tmp_path, None))
    assert untold.returncode != 0
    assert f"{CUDA}: cannot open shared object" in untold.stderr
    found = find(CUDA, tmp_path, {"LD_LIBRARY_PATH": str(driver)}, tmp_path / "volume")
    told = run(program, timeout_s=60, environment=gpu_environment(engine, tmp_path, found.folder))
    assert told.stdout == "driver the engine's\n"
    # What would come of the driver's folder alone: DT_RUNPATH comes after it.
    alone = run(program, timeout_s=60, environment={"LD_LIBRARY_PATH": str(driver)})
    assert alone.stdout == "driver somebody else's\n"


def test_why_the_backend_does_not_load_is_asked_as_the_engine_is_started(layout: Path, tmp_path: Path) -> None:
    """The engine lists no device. With the driver's folder in its library path its backend loads, and nothing is
    said."""
    engine = tmp_path / "engine"
    engine.mkdir()
    shutil.copy(layout / "engine" / OWN, engine / OWN)
    (tmp_path / "backend.c").write_text("const char *driver(void); const char *use(void) { return driver(); }\n")
    backend = engine / "libggml-cuda.so"
    _gcc("-shared", "-fPIC", "-o", backend, tmp_path / "backend.c", layout / "nvidia/lib64" / CUDA)
    (engine / "llama-server").write_text("#!/bin/sh\necho 'Available devices:'\n")
    (engine / "llama-server").chmod(0o755)
    assert f"{CUDA}: cannot open shared object" in query_devices(engine, tmp_path).said
    assert query_devices(engine, tmp_path, driver_dir=layout / "nvidia/lib64").said == ""
