"""What tests with a real child process share."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.alone import be_alone
from tests.fakes.machines import build_library
from tests.process.stages.boot import Home
from tests.process.stages.made_once import made_once
from tests.process.stages.nvml import PutMachine, put_machine
from tests.process.stages.own_process import own_process
from tests.process.stages.supervisor import MakeCommand, fake_command


@pytest.fixture(scope="package", autouse=True)
def _alone() -> Iterator[None]:
    """Hide Docker and what runs there, so that the results are the same on a machine with it and without."""
    with pytest.MonkeyPatch.context() as patch:
        be_alone(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Heed SIGINT again: a run that a shell started with `&` ignores it, and so would every program that a test
    starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    """Fail a test that leaves its process changed: any other test may come next there."""
    before = own_process()
    yield
    assert own_process() == before


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """One measured volume for the whole run; a test takes a copy."""
    return Home(made_once(tmp_path_factory, "tuned", lambda folder: Home.tuned(folder / "home").folder))


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A short path for a unix socket, which may have 108 bytes: pytest's own temporary folders can exceed them."""
    folder = Path(tempfile.mkdtemp(prefix="sv", dir="/tmp"))
    yield folder / "e.sock"
    shutil.rmtree(folder)


@pytest.fixture
def make_command(socket_path: Path) -> MakeCommand:
    return partial(fake_command, socket_path)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler: the fake NVML is built from tests/fakes/nvml/nvml.c")
    return made_once(tmp_path_factory, "nvml", build_library)


@pytest.fixture
def machine_environment(nvml_library: Path, tmp_path: Path) -> PutMachine:
    """`machine_environment("2x4090", hang__nvmlDeviceGetName=1)`: the environment of a child on that machine."""
    return partial(put_machine, nvml_library, tmp_path)
