"""The devcontainer without a GPU, built of cached layers and entered by its command line, as a user who is not 1000."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

pytestmark = pytest.mark.build_half
ROOT = Path(__file__).parents[2]
BASE = "debian:bookworm-slim"
FOLDERS = (".devcontainer", "appliance", "images")
FILES = ("build_matrix.yaml", "pyproject.toml")
# Where the tests run as root: a user of this machine whose number the image lacks; the command line asks for its name.
OF_THE_IMAGE = (*range(101), 1000, 65534)
# They name folders that this other user may not write to.
OF_THE_CALLER = {"DOCKER_CONFIG", "BUILDX_CONFIG", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"}
# Without cached layers it fetches compilers and some hundred wheels.
PATIENCE_S = 900


@dataclass(frozen=True)
class Workspace:
    """A copy of the project that belongs to somebody; volumes and image have its name."""

    folder: Path
    uid: int

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def configuration(self) -> Path:
        return self.folder / ".devcontainer/cpu/devcontainer.json"

    def cli(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        at = ("--workspace-folder", str(self.folder), "--config", str(self.configuration))
        argv = (str(self.folder / ".devcontainer/cli"), verb, *at, "--id-label", f"appliance.test={self.name}", *words)
        theirs = {name: value for name, value in os.environ.items() if name not in OF_THE_CALLER}
        environment = theirs | {"HOME": str(self.folder), "BASE": BASE, "CA_BUNDLE": certificates()}
        return subprocess.run(
            argv, env=environment, **self._identity(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def _identity(self) -> dict[str, Any]:
        if os.getuid() == self.uid:
            return {}
        return {"user": self.uid, "group": self.uid, "extra_groups": [Path("/var/run/docker.sock").stat().st_gid]}

    def rename(self) -> None:
        """Give the workspace its own volumes. The engine's volume takes the owner of its first user."""
        text = self.configuration.read_text()
        assert text.count("appliance-dev-") == 4
        self.configuration.write_text(text.replace("appliance-dev-", f"{self.name}-"))

    def promise(self, old: str, new: str) -> None:
        text = self.configuration.read_text()
        assert old in text
        self.configuration.write_text(text.replace(old, new))


def certificates() -> str:
    """Return the path of the CA bundle that the Makefile would choose; /dev/null if no variable names one."""
    names = ("CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    return next((os.environ[name] for name in names if os.environ.get(name)), "/dev/null")


@pytest.fixture(scope="module")
def workspace() -> Iterator[Workspace]:
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("needs node and npm: the command line of devcontainers is a program of npm")
    uid = os.getuid() or max((user.pw_uid for user in pwd.getpwall() if user.pw_uid not in OF_THE_IMAGE), default=0)
    if not uid:
        pytest.skip("needs a user: a devcontainer is nobody's root, and this machine has no user but root")
    client = docker.from_env()
    name = f"appliance-test-{uuid.uuid4().hex[:12]}"
    folder = Path(tempfile.gettempdir()) / name
    place = Workspace(folder, uid)
    try:
        _copy(place)
        yield place
    finally:
        _remove(client, place)
        client.close()


def _copy(place: Workspace) -> None:
    subprocess.run(
        [ROOT / ".devcontainer/cli", "--version"], capture_output=True, timeout=300, check=True
    )  # fetches it
    for name in FOLDERS:
        shutil.copytree(ROOT / name, place.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, place.folder)
    (fetched,) = (ROOT / ".make").glob("devcontainers-cli-[0-9.]*[0-9]")
    shutil.copytree(fetched, place.folder / ".make" / fetched.name)
    place.rename()
    for path in (place.folder, *place.folder.rglob("*")):
        os.chown(path, place.uid, place.uid if os.getuid() == 0 else -1)


def _remove(client: docker.DockerClient, place: Workspace) -> None:
    for container in client.containers.list(
        all=True, ignore_removed=True, filters={"label": f"appliance.test={place.name}"}
    ):
        container.remove(force=True)
    for volume in client.volumes.list():
        if volume.name.startswith(place.name):
            volume.remove()
    for image in client.images.list():
        if any(tag.startswith(f"vsc-{place.name}") for tag in image.tags):
            client.images.remove(str(image.id), force=True)
    shutil.rmtree(place.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def entered(workspace: Workspace) -> Workspace:
    done = workspace.cli("up")
    assert done.returncode == 0, done.stderr[-4000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["outcome"], outcome["remoteUser"]) == ("success", "developer")
    return workspace


def test_everything_is_as_promised(entered: Workspace) -> None:
    done = entered.cli("exec", ".devcontainer/check", "cpu")
    lines = [line for line in done.stdout.splitlines() if re.match("PASS|FAIL", line)]
    assert [line for line in lines if line.startswith("FAIL")] == []
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(lines) > 25
    assert f"PASS  writable: /workspaces/{entered.name}" in lines


def test_what_is_written_belongs_to_the_user_of_the_machine(entered: Workspace) -> None:
    done = entered.cli(
        "exec", "sh", "-c", "id -u && touch made ~/data/made ~/engine/llama.cpp/made && stat -c %u ~/data"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(entered.uid)] * 2
    assert (entered.folder / "made").stat().st_uid == entered.uid


def test_the_engine_is_upstream_with_our_patches_and_the_flags_of_the_cell(entered: Workspace) -> None:
    done = entered.cli("exec", "sh", "-c", "git -C ~/engine/llama.cpp log --oneline && cat /opt/engine/flags")
    log, *flags = done.stdout.splitlines()
    assert "with the patches of this project" in log
    assert len(flags) == 20
    assert all(flag.startswith("-D") for flag in flags)
    assert {"-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DGGML_OPENMP=OFF"} <= set(flags)


def test_its_commands_say_what_is_missing(entered: Workspace) -> None:
    for verb, code, said in (("serve", 44, "the engine is not built"), ("biuld", 2, "unknown verb: biuld")):
        done = entered.cli("exec", ".devcontainer/dev", verb)
        assert done.returncode == code, verb
        assert said in done.stdout + done.stderr
    assert ".devcontainer/dev engine" in entered.cli("exec", ".devcontainer/dev", "help").stdout


def test_a_broken_promise_is_told(entered: Workspace) -> None:
    """Last: it changes what is promised, and not the container."""
    entered.promise('"CCACHE_MAXSIZE": "4G"', '"CCACHE_MAXSIZE": "5G"')
    entered.promise('"gdb --version": "GNU gdb"', '"ugdb --version": "GNU ugdb"')
    done = entered.cli("exec", "--remote-env", "ENGINE_CELL=other", ".devcontainer/check", "cpu")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 61
    assert failed[0] == "FAIL  variable CCACHE_MAXSIZE=5G: is 4G"
    assert failed[1] == "FAIL  variable ENGINE_CELL=llama-cpu: is other"
    assert failed[2].startswith("FAIL  ugdb --version: ")
    assert len(failed) == 3
