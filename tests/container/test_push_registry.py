"""An image pushed to a real registry: the same manifest as here, with what it is and how it was made beside it."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker as docker_py
import pytest

from images import docker
from images.build import build, model
from images.ci import push
from images.errors import BuildError, VerificationError
from images.host import published
from images.matrix import matrix
from images.pins import web_lock
from images.proof import reproduce, sbom
from tests.container.small_cell import ca_bundle
from tests.container.stages.registry import manifest, registry

pytestmark = pytest.mark.build_half
ROOT = Path(__file__).parents[2]
BASE = "debian:bookworm-slim"
STEPS = (
    "RUN --mount=type=secret,id=ca cat /run/secrets/ca > /dev/null && echo {mark} > /mark\nUSER 1000:0\nVOLUME /data\n"
)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with registry() as found:
        yield found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("push")


@pytest.fixture(scope="module")
def job(root: Path) -> Iterator[build.Job]:
    """A small build under a cell's name, with the certificates of this machine lent to it."""
    cell = matrix.select(matrix.load(ROOT).cells, "llama-cpu")[0]
    mark = f"appliance-test-{uuid.uuid4().hex}"
    (root / cell.folder).mkdir(parents=True)
    (root / cell.folder / "Dockerfile").write_text(f"FROM {cell.base.reference}\n{STEPS.format(mark=mark)}")
    for path in (push.SCANNER, web_lock.WEB):  # the bill of materials names the pages' libraries
        (root / path).parent.mkdir(parents=True)
        (root / path).write_bytes((ROOT / path).read_bytes())
    bundle = root / "ca.pem"
    bundle.write_bytes((ca_bundle() or Path("/etc/ssl/certs/ca-certificates.crt")).read_bytes())
    yield build.Job(
        cell=cell,
        base=build.BaseChoice(identity="sha256:x", context=f"docker-image://{BASE}", override=BASE),
        origin=build.Origin(epoch_s=1700000000, revision=None),
        build_id="b" * 32,
        version="0",
        tag=f"{mark}:test",
        archive=root / build.ARCHIVES / "o.oci.tar",
        ca_bundle=bundle,
    )
    engine = docker.Engine()
    engine.remove(f"{mark}:test")
    for _ in range(2):
        for record in engine.build_cache():
            if mark in record.description:
                engine.prune_cache(record.id)


@pytest.fixture(scope="module")
def built(root: Path, job: build.Job) -> build.Built:
    engine = docker.Engine()
    made = build.build(root, job, engine)
    sbom.write(root, job.cell, engine, image=job.tag, out=root / sbom.path_for(job.cell))
    return made


@pytest.fixture(scope="module")
def pushed(root: Path, job: build.Job, built: build.Built, host: str) -> push.Pushed:
    return push.push(root, job, built, docker.Engine(), name=f"{host}/team/appliance")


def kept(job: build.Job) -> list[str]:
    """Return the files that remain when the archive is pushed: bill of materials and build time, without the build
    id."""
    names = (path.name for path in job.archive.parent.iterdir())
    return sorted(name.removeprefix(f"{job.build_id}.") for name in names)


def test_what_is_pushed_is_what_was_built_with_both_attestations(
    root: Path, job: build.Job, built: build.Built, pushed: push.Pushed, host: str
) -> None:
    assert pushed.manifest == built.digest
    assert pushed.reference.startswith(f"{host}/team/appliance:llama-cpu-amd64@sha256:")
    assert _left_behind(host) == []
    assert kept(job) == ["llama-cpu.spdx.json", "took.json"]
    index = manifest(host, "team/appliance", pushed.reference.rpartition("@")[2]).json()
    assert index["manifests"][0]["digest"] == built.digest
    bill = json.loads((root / sbom.path_for(job.cell)).read_text("utf-8"))
    assert _inspect(pushed.reference, "{{json .SBOM}}")["SPDX"]["packages"] == bill["packages"]


def test_its_provenance_says_how_it_was_made_and_nothing_of_this_machine(root: Path, pushed: push.Pushed) -> None:
    provenance = json.dumps(_inspect(pushed.reference, "{{json .Provenance}}")["SLSA"])
    assert f'"build-arg:APPLIANCE_BUILD_ID": "{"b" * 32}"' in provenance
    assert "pkg:docker/appliance-sbom@llama-cpu" in provenance
    for private in (str(root), str(ROOT), "_proxy", "BEGIN CERTIFICATE"):
        assert private not in provenance


def test_it_is_pulled_by_digest_and_runs(job: build.Job, built: build.Built, pushed: push.Pushed) -> None:
    client = docker_py.from_env()
    named, _, digest = pushed.reference.partition("@")
    repository = named.rpartition(":")[0]
    image = client.images.pull(repository, tag=digest)
    try:
        said = client.containers.run(f"{repository}@{digest}", ["cat", "/mark"], remove=True)
        assert said.decode().strip() == job.tag.partition(":")[0]
        assert image.labels[build.BUILD_ID_LABEL] == built.build_id
    finally:
        client.images.remove(f"{repository}@{digest}", force=True)


def test_the_merge_of_the_workflow_keeps_what_was_said(built: build.Built, pushed: push.Pushed, host: str) -> None:
    digest = pushed.reference.rpartition("@")[2]
    words = ("docker", "buildx", "imagetools", "create", "--tag", f"{host}/team/appliance:merged")
    done = subprocess.run([*words, f"{host}/team/appliance@{digest}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    merged = manifest(host, "team/appliance", "merged").json()["manifests"]
    assert built.digest in [each["digest"] for each in merged]
    assert _inspect(f"{host}/team/appliance:merged", "{{json .SBOM}}")["SPDX"]["packages"]


def test_platforms_are_merged_and_the_registry_tells_digest_and_size(
    root: Path, job: build.Job, pushed: push.Pushed, host: str
) -> None:
    """The index has the platform that was pushed, and the size is what a pull of it downloads."""
    name = f"{host}/team/appliance"
    assert push.merge(root, job.cell, name) == ("linux/amd64",)
    row = published.ask(root, name, job.cell.id, None)
    answer = manifest(host, "team/appliance", row.digest)
    (own,) = [each for each in answer.json()["manifests"] if each["digest"] == pushed.manifest]
    parts = manifest(host, "team/appliance", own["digest"]).json()
    assert row.compressed_bytes == parts["config"]["size"] + sum(layer["size"] for layer in parts["layers"])
    assert row.image == f"{name}:llama-cpu"
    with pytest.raises(BuildError, match=f"the registry has no platform of {name}/qwen:llama-cpu"):
        push.merge(root, job.cell, f"{name}/qwen")
    with pytest.raises(BuildError, match="the registry does not have this image") as caught:
        published.ask(root, name, job.cell.id, "qwen")
    assert caught.value.exit_code == 60


def test_the_image_of_a_model_is_pushed_as_it_is_here(
    root: Path, job: build.Job, built: build.Built, host: str
) -> None:
    made = model.ModelImage(tag=job.tag, cell=job.cell.id, digest=built.digest, is_reused=True)
    name = f"{host}/team/appliance/demo"
    assert push.push_model(root, job.cell, made, docker.Engine(), name=name) == (
        f"{name}:llama-cpu-amd64@{built.digest}"
    )
    assert manifest(host, "team/appliance/demo", built.digest).status_code == 200
    other = replace(made, digest=f"sha256:{'0' * 64}")
    with pytest.raises(BuildError, match="the registry does not have what was pushed"):
        push.push_model(root, job.cell, other, docker.Engine(), name=name)


def test_a_fresh_build_is_compared_with_what_was_published(
    root: Path, job: build.Job, pushed: push.Pushed, built: build.Built
) -> None:
    there = reproduce.published(pushed.reference, "linux/amd64", cwd=root)
    assert there.manifest == built.digest
    same = reproduce.against(root, job, docker.Engine(), there)
    assert same.is_same
    later = replace(job, origin=replace(job.origin, epoch_s=job.origin.epoch_s + 1))
    other = reproduce.against(root, later, docker.Engine(), there)
    assert (other.is_same, other.second, other.difference) == (False, built.digest, None)
    assert kept(job) == ["llama-cpu.spdx.json", "took.json"]


def test_nothing_published_under_that_digest_is_exit_60(root: Path, host: str) -> None:
    with pytest.raises(BuildError, match="no registry answers for what was published"):
        reproduce.published(f"{host}/nobody@sha256:{'0' * 64}", "linux/amd64", cwd=root)


def test_an_image_that_came_out_differently_is_not_pushed(
    root: Path, job: build.Job, built: build.Built, host: str
) -> None:
    built = replace(built, digest="sha256:" + "0" * 64)
    with pytest.raises(VerificationError, match="came out differently") as caught:
        push.push(root, job, built, docker.Engine(), name=f"{host}/other")
    assert caught.value.exit_code == 61
    assert manifest(host, "other", "llama-cpu-amd64").status_code == 404
    assert _left_behind(host) == []


def test_a_proxy_in_a_build_argument_is_not_published(
    root: Path, job: build.Job, built: build.Built, host: str
) -> None:
    """The proxy comes from `proxies` in Docker's config.json."""
    config = root / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps({"proxies": {"default": {"httpProxy": "http://me:pw@proxy:1"}}}))
    program = (
        "import pickle, sys\nfrom pathlib import Path\nfrom images import docker\nfrom images.ci import push\n"
        "root, job, built = pickle.loads(sys.stdin.buffer.read())\n"
        "try:\n    push.push(root, job, built, docker.Engine(), name=sys.argv[1])\n"
        "except push.VerificationError as error:\n    sys.exit(error.message)\n"
    )
    argv = ("env", f"DOCKER_CONFIG={config}", sys.executable, "-c", program, f"{host}/proxied")
    done = subprocess.run(argv, input=pickle.dumps((root, job, built)), capture_output=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert re.fullmatch(
        r"cell llama-cpu: its provenance would publish the address of a proxy: .*http_proxy.*", last, re.I
    )
    assert "pw@" not in last
    assert manifest(host, "proxied", "llama-cpu-amd64").status_code == 404


def test_a_registry_that_does_not_answer_is_exit_60(root: Path, job: build.Job, built: build.Built) -> None:
    with pytest.raises(BuildError, match=r"image was not pushed: 127.0.0.1:9/appliance:llama-cpu") as caught:
        push.push(root, job, built, docker.Engine(), name="127.0.0.1:9/appliance")
    assert caught.value.exit_code == 60
    assert "docker login 127.0.0.1:9" in (caught.value.hint or "")
    assert _left_behind("127.0.0.1:9/") == []


def _left_behind(host: str) -> list[str]:
    """Return the image names that a push left on this machine."""
    names = [name for image in docker_py.from_env().images.list() for name in image.tags]
    return [name for name in names if host in name or "appliance-sbom:" in name]


def _inspect(reference: str, what: str) -> Any:
    argv = ("docker", "buildx", "imagetools", "inspect", "--format", what, reference)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
