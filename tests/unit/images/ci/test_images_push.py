"""What leaves this machine, and what must not: each fault planted in an archive's contents or in a provenance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from images import __main__ as command
from images import docker
from images.build import build
from images.ci import push
from images.errors import UsageError, VerificationError
from images.layers.oci import Contents
from images.matrix import matrix
from images.matrix.matrix import Cell

MINE = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
BILL: dict[str, Any] = {"packages": [{"SPDXID": "SPDXRef-image"}, {"SPDXID": "SPDXRef-deb-libc6"}]}
ROOT = Path("/home/somebody/appliance")


@pytest.fixture
def job(cell: Cell) -> build.Job:
    return build.Job(
        cell=cell,
        base=build.BaseChoice(identity=MINE),
        origin=build.Origin(epoch_s=1, revision=None),
        build_id="b" * 32,
        version="0",
        tag=cell.tag,
        archive=ROOT / ".make/images/llama-cpu.oci.tar",
        ca_bundle=Path("/etc/corporate/ca.pem"),
        no_cache=True,
        cache_to=("type=local,dest=x",),
    )


@pytest.mark.parametrize("name", ["appliance", "ghcr.io/team/appliance", "localhost:5000/a/b-c_d.e", "127.0.0.1:1/x"])
def test_repositories(name: str) -> None:
    assert push.check_name(name) == name


@pytest.mark.parametrize("name", ["", "host/app:tag", f"host/app@{MINE}", "Host/App", "https://host/app", "host//app"])
def test_what_is_no_repository_is_exit_2(name: str) -> None:
    with pytest.raises(UsageError, match="--push takes a repository without tag or digest"):
        push.check_name(name)


def test_a_bad_repository_is_refused_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--push", "host/app:latest"]) == 2
    assert "host/app:latest" in capsys.readouterr().err


def test_the_tag_names_the_architecture_only_where_there_are_two(project: Path) -> None:
    one, both = (matrix.select(matrix.load(project).cells, f"llama-cu130-sm{sm}")[0] for sm in (75, 90))
    assert push.tag_of(one, "linux/amd64") == "llama-cu130-sm75"
    assert push.tag_of(both, "linux/arm64") == "llama-cu130-sm90-arm64"


def test_the_command_is_the_builds_own_from_the_cache(job: build.Job) -> None:
    mine, attested = build.buildx_argv(job), push.attested_argv(job, "scanner:1")
    assert attested[:3] == ("env", "BUILDX_GIT_INFO=false", "docker")
    assert attested[7:9] == ("--attest", "type=sbom,generator=scanner:1")
    assert "type=provenance,mode=max" in attested
    assert not {"--no-cache", "--cache-to", "--provenance=false", "--sbom=false"} & set(attested)
    for word in mine:
        if word not in {"--no-cache", "--cache-to", "type=local,dest=x", "--provenance=false", "--sbom=false"}:
            assert word in attested


def test_an_image_of_an_earlier_commit_is_not_current(job: build.Job) -> None:
    labels = {**build.moment_labels(job), "io.appliance.cell": "llama-cpu"}
    image = docker.Image(id=MINE, tags=(), digests=(), config={"Labels": labels})
    assert push.is_current(job, image)
    assert not push.is_current(job, None)
    later = replace(job, origin=build.Origin(epoch_s=2, revision=None))
    assert not push.is_current(later, image)
    assert not push.is_current(replace(job, origin=build.Origin(epoch_s=1, revision="f" * 40)), image)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"manifest": OTHER}, f"came out differently when it was exported again: {OTHER}, not {MINE}"),
        ({"statements": ()}, "has no provenance beside it: nothing is"),
        ({"statements": (provenance := {"predicateType": "https://slsa.dev/provenance/v0.2", "predicate": {}},)},
         "has another bill of materials beside it: 0 packages"),
        ({"statements": (provenance, {"predicateType": push.SPDX, "predicate": {"packages": BILL["packages"][:1]}})},
         "has another bill of materials beside it: 1 packages"),
    ],
)  # fmt: skip
def test_another_image_is_exit_61(cell: Cell, change: dict[str, Any], message: str) -> None:
    push.refuse_other(cell, contents(), MINE, BILL)  # with its attestations, as it was built, it is let through
    with pytest.raises(VerificationError) as caught:
        push.refuse_other(cell, replace(contents(), **change), MINE, BILL)
    assert message in caught.value.message
    assert caught.value.exit_code == 61


def test_a_provenance_without_secrets_is_let_through_until_a_word_of_it_is_one(cell: Cell, job: build.Job) -> None:
    predicate = {
        "buildType": "https://mobyproject.org/buildkit@v1",
        "buildDefinition": {"buildType": "https://github.com/moby/buildkit/blob/master/docs/slsa-definitions.md"},
        "invocation": {"parameters": {"args": {"build-arg:SOURCE_DATE_EPOCH": "1", "label:a": "b"}, "secrets": []}},
        "buildConfig": {"llbDefinition": [{"op": {"Op": {"source": {"identifier": "docker-image://debian"}}}}]},
    }
    push.refuse_leaks(cell, [statement(predicate)], private=push.private_words(ROOT, job))
    with pytest.raises(VerificationError):
        push.refuse_leaks(cell, [statement(predicate)], private=("docker-image://debian",))


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"build-arg:HTTP_PROXY": "http://me:pw@proxy:3128"}, "the address of a proxy"),
        ({"build-arg:https_proxy": ""}, "the address of a proxy"),
        ({"x": "cat /etc/corporate/ca.pem"}, "a path of this machine"),
        ({"context": f"{ROOT}/images"}, "a path of this machine"),
        ({"build-arg:PIP_INDEX_URL": "https://packages.example/simple"}, "an address"),
        ({"x": "see https://slsa.dev.internal.example/"}, "an address"),
        ({"x": "git://build.internal/repository"}, "an address"),
        ({"x": "-----BEGIN RSA PRIVATE KEY-----"}, "a private key"),
    ],
)
def test_a_secret_in_the_provenance_is_exit_61_and_not_repeated(
    cell: Cell, job: build.Job, args: dict[str, str], why: str
) -> None:
    planted = statement({"invocation": {"parameters": {"args": args}}})
    with pytest.raises(VerificationError) as caught:
        push.refuse_leaks(cell, [planted], private=push.private_words(ROOT, job))
    [(name, value)] = args.items()
    assert caught.value.message == (
        f"cell llama-cpu: its provenance would publish {why}: predicate.invocation.parameters.args.{name}"
    )
    assert not value or value not in caught.value.message


def contents() -> Contents:
    return Contents(
        index="sha256:" + "c" * 64,
        manifest=MINE,
        statements=(statement({}), {"predicateType": push.SPDX, "predicate": BILL}),
    )


def statement(predicate: dict[str, Any]) -> dict[str, Any]:
    return {"_type": push.STATEMENT_TYPE, "predicateType": f"{push.PROVENANCE}v0.2", "predicate": predicate}
