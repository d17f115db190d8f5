"""`make clean`, in a copy of what it needs and with names of its own: it removes what make made and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

from tests.container.stages.containers import IMAGE, ROOT


class Workplace:
    """A copy of the Makefile and the compose file; one word is project, volume and repository of tags."""

    def __init__(self, folder: Path, client: docker.DockerClient) -> None:
        self.name = f"appliance-test-{uuid.uuid4().hex[:12]}"
        self.folder = folder
        self.client = client
        shutil.copy(ROOT / "Makefile", folder)
        shutil.copytree(ROOT / "compose", folder / "compose")
        for name in ("appliance", "images", "tests", "benchmarks", ".make"):
            (folder / name).mkdir()

    def clean(self) -> str:
        names = (f"APPLIANCE_PROJECT={self.name}", f"APPLIANCE_VOLUME={self.name}")
        done = subprocess.run(
            ["make", "clean", *names], cwd=self.folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def compose(self, *words: str) -> None:
        argv = ["docker", "compose", "--project-name", self.name, "--file", str(self.folder / "compose/appliance.yaml")]
        environment = {"APPLIANCE_VOLUME": self.name, "APPLIANCE_IMAGE": IMAGE, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        subprocess.run([*argv, *words], env=environment, stdin=subprocess.DEVNULL, timeout=120, check=True)

    def has_volume(self) -> bool:
        return any(volume.name == self.name for volume in self.client.volumes.list())

    def tag(self, word: str) -> str:
        self.client.images.get(IMAGE).tag(self.name, word)
        return f"{self.name}:{word}"

    def has_image(self, tag: str) -> bool:
        try:
            self.client.images.get(tag)
        except docker.errors.ImageNotFound:
            return False
        return True


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    client = docker.from_env()
    place = Workplace(tmp_path, client)
    yield place
    place.compose("down")
    for volume in client.volumes.list():
        if volume.name == place.name:
            volume.remove()
    for word in ("mine", "foreign"):
        if place.has_image(f"{place.name}:{word}"):
            client.images.remove(f"{place.name}:{word}")
    client.close()


def test_what_compose_made_is_removed(workplace: Workplace) -> None:
    workplace.compose("run", "--rm", "-T", "--no-deps", "appliance", "models", "list")
    assert workplace.has_volume()
    assert "kept: volume" not in workplace.clean()
    assert not workplace.has_volume()
    assert not workplace.client.networks.list(names=[workplace.name])


def test_a_volume_that_somebody_else_made_is_kept_and_said(workplace: Workplace) -> None:
    workplace.client.volumes.create(workplace.name)
    assert f"kept: volume {workplace.name}" in workplace.clean()
    assert workplace.has_volume()


def test_only_the_tags_that_make_built_are_removed(workplace: Workplace) -> None:
    mine, foreign = workplace.tag("mine"), workplace.tag("foreign")  # both carry our labels
    (workplace.folder / ".make/built").write_text(f"{mine}\n")
    workplace.clean()
    assert not workplace.has_image(mine)
    assert workplace.has_image(foreign)
    assert workplace.has_image(IMAGE)
    assert not (workplace.folder / ".make").exists()
