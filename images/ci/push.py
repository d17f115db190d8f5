"""Step 5: built image -> registry, with its bill of materials and provenance.

BuildKit exports the image again, from its cache, with both attestations. It leaves this machine only if the manifest is
the one that was built and proven, and nothing private is in the attestations.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from images import docker
from images.build.build import FILES_LABEL, Built, Job, buildx_argv, explain_failure, moment_labels
from images.build.model import ModelImage
from images.errors import BuildError, UsageError, VerificationError
from images.layers import oci
from images.matrix.matrix import Cell
from images.proof import sbom

SCANNER = Path("images/scanner/Dockerfile")
STATEMENT = "statement.json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v0.1"
SPDX = "https://spdx.dev/Document"
PROVENANCE = "https://slsa.dev/provenance/"
ADDRESS = re.compile(r"\b(?:https?|ftp|ssh|git)://[^\s\"'\\]+", re.IGNORECASE)
# The vocabularies of the attestations themselves; a newer BuildKit names its own documentation as its build type.
VOCABULARY = re.compile(
    r"https://(?:mobyproject\.org|in-toto\.io|slsa\.dev|spdx\.dev|github\.com/moby/buildkit)(?:[/#]|$)"
)
PROXY = re.compile(r"(?:^|[^a-z])(?:https?|ftp|all|no)_proxy|proxy_?env", re.IGNORECASE)
ASKED_S = 60.0  # for an answer of a registry
PRIVATE_KEY = "PRIVATE KEY-----"


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A pushed image. `reference` is NAME:TAG@DIGEST of the index; `manifest` is equal for two equal builds."""

    reference: str
    manifest: str


def check_name(name: str, flag: str = "--push") -> str:
    """Raises UsageError for anything but a repository: tag and digest are not the caller's to choose."""
    if not docker.IMAGE_NAME.match(name):
        message = f"{flag} takes a repository without tag or digest: {name}"
        raise UsageError(message, hint="such as registry.example/appliance; the tag is the cell's id")
    return name


def tag_of(cell: Cell, platform: str) -> str:
    """Returns the cell's id, with the architecture if another machine pushes the other half of the index."""
    return cell.id if len(cell.platforms) == 1 else f"{cell.id}-{platform.partition('/')[2]}"


def is_current(job: Job, image: docker.Image | None) -> bool:
    """True if an image with this build id also has the job's date, revision and version, which a registry shows."""
    if image is None or not job.publisher.is_of(image.labels):
        return False
    return moment_labels(job).items() <= image.labels.items()


def push(root: Path, job: Job, built: Built, engine: docker.Engine, *, name: str) -> Pushed:
    """Pushes the image with both attestations. Raises BuildError if it cannot be exported or pushed.

    Raises VerificationError if it is not what was built, or reveals more than it should.
    """
    reference = f"{name}:{tag_of(job.cell, engine.platform)}"
    bill = json.loads((root / sbom.path_for(job.cell)).read_text("utf-8"))
    archive = job.archive.with_name(f"{job.cell.id}.push.oci.tar")
    is_new = engine.image(reference) is None
    try:
        with _scanner(root, job, bill, engine) as scanner:
            sealed = _files_of(engine.image(built.digest))
            again = replace(job, tag=reference, archive=archive, files_sha256=sealed)
            _run(root, job, attested_argv(again, scanner))
        with oci.opened(archive) as tar:
            contents = oci.read(tar)
        refuse_other(job.cell, contents, built.digest, bill)
        private = private_words(root, job)
        refuse_leaks(job.cell, contents.statements, private=private, public=tuple(job.publisher.labels.values()))
        engine.load(archive)
        _push(root, reference, contents.index)
    finally:
        archive.unlink(missing_ok=True)
        if is_new:
            engine.remove(reference)
    return Pushed(reference=f"{reference}@{contents.index}", manifest=contents.manifest)


def push_model(root: Path, cell: Cell, made: ModelImage, engine: docker.Engine, *, name: str) -> str:
    """Pushes a model image and returns NAME:TAG@DIGEST. What it is made of, the bill of materials of its cell says.

    Raises BuildError if the registry has another manifest afterwards than the image here.
    """
    reference = f"{name}:{tag_of(cell, engine.platform)}"
    is_new = engine.image(reference) is None
    engine.tag(made.tag, reference)
    try:
        _push(root, reference, made.digest)
    finally:
        if is_new:
            engine.remove(reference)
    return f"{reference}@{made.digest}"


def merge(root: Path, cell: Cell, name: str) -> tuple[str, ...]:
    """Makes NAME:<cell> of what the platforms have pushed, and returns those that have. A cell of one platform has
    that tag already. Raises BuildError if nothing is there."""
    if len(cell.platforms) == 1:
        return cell.platforms
    tags = {platform: f"{name}:{tag_of(cell, platform)}" for platform in cell.platforms}
    there = {platform: tag for platform, tag in tags.items() if docker.registry_has(tag, timeout_s=ASKED_S)}
    if not there:
        message = f"the registry has no platform of {name}:{cell.id}: {', '.join(tags.values())}"
        raise BuildError(message, hint=f"python -m images build --only {cell.id} --push {name}")
    argv = ("docker", "buildx", "imagetools", "create", "--tag", f"{name}:{cell.id}", *there.values())
    asked = docker.capture(argv, cwd=root)
    if asked.code != 0:
        message = f"platforms were not merged: {name}:{cell.id}: {' '.join(asked.lines)}"
        raise BuildError(message, hint="may you write there? docker login " + name.partition("/")[0])
    return tuple(there)


def _files_of(image: docker.Image | None) -> str | None:
    """Returns the label with the hash of the image's file manifest. The exported image gets the same label."""
    return image.labels.get(FILES_LABEL) if image else None


def attested_argv(job: Job, scanner: str) -> tuple[str, ...]:
    """Returns the build's command, from the cache, with a bill of materials and provenance.

    Git is left out: it would add a remote's address and paths of this machine. The revision is a label.
    """
    attest = (f"type=sbom,generator={scanner}", "type=provenance,mode=max")
    again = replace(job, no_cache=False, cache_to=(), attest=attest)
    return ("env", "BUILDX_GIT_INFO=false", *buildx_argv(again))


def scanner_argv(job: Job, scanner: str, context: Path) -> tuple[str, ...]:
    return (
        *("env", "BUILDX_GIT_INFO=false", "docker", "buildx", "build", "--progress", "plain", "--provenance=false"),
        *("--sbom=false", "--load", "--tag", scanner, "--file", SCANNER.as_posix(), "--build-arg", f"IMAGE={job.tag}"),
        str(context),
    )


def refuse_other(cell: Cell, contents: oci.Contents, digest: str, bill: Mapping[str, Any]) -> None:
    """Raises VerificationError unless this is the built image, with both attestations and its own bill."""
    if contents.manifest != digest:
        message = f"cell {cell.id} came out differently when it was exported again: {contents.manifest}, not {digest}"
        hint = f"nothing was pushed; python -m images verify --reproduce {cell.id} names what differs"
        raise VerificationError(message, hint=hint)
    found = {str(statement["predicateType"]): statement for statement in contents.statements}
    if not any(kind.startswith(PROVENANCE) for kind in found):
        message = f"cell {cell.id} has no provenance beside it: {', '.join(found) or 'nothing is'}"
        raise VerificationError(message, hint="nothing was pushed; docker buildx version tells how old this one is")
    said = found.get(SPDX, {}).get("predicate", {}).get("packages", [])
    if [package["SPDXID"] for package in said] != [package["SPDXID"] for package in bill["packages"]]:
        message = f"cell {cell.id} has another bill of materials beside it: {len(said)} packages"
        raise VerificationError(message, hint=f"expected are the {len(bill['packages'])} of {sbom.path_for(cell)}")


def private_words(root: Path, job: Job) -> tuple[str, ...]:
    """Returns words that only this machine has and no attestation may repeat."""
    return (str(root), *([str(job.ca_bundle)] if job.ca_bundle else []))


def refuse_leaks(
    cell: Cell, statements: Iterable[Mapping[str, Any]], *, private: tuple[str, ...], public: tuple[str, ...] = ()
) -> None:
    """Raises VerificationError naming the place in the provenance that holds something private.

    `public`: values that may be in it.
    """
    provenance = [each for each in statements if str(each["predicateType"]).startswith(PROVENANCE)]
    for path, value in (leaf for statement in provenance for leaf in oci.leaves("", statement)):
        why = None if value in public else _leak(path, str(value), private)
        if why:
            message = f"cell {cell.id}: its provenance would publish {why}: {path}"
            hint = "nothing was pushed; `proxies` in Docker's config.json become build arguments: take them out"
            raise VerificationError(message, hint=hint)


def _leak(path: str, value: str, private: tuple[str, ...]) -> str | None:
    """Describes a leak without repeating it: the message may end up in a log as public as the registry."""
    if PROXY.search(path) or PROXY.search(value):
        return "the address of a proxy"
    if any(word in value for word in private):
        return "a path of this machine"
    if PRIVATE_KEY in value:
        return "a private key"
    foreign = [address for address in ADDRESS.findall(f"{path} {value}") if not VOCABULARY.match(address)]
    return "an address" if foreign else None


@contextmanager
def _scanner(root: Path, job: Job, bill: Mapping[str, Any], engine: docker.Engine) -> Iterator[str]:
    """Makes a temporary image that answers BuildKit's question with this document."""
    scanner = f"appliance-sbom:{job.cell.id}"
    statement = {"_type": STATEMENT_TYPE, "predicateType": SPDX, "predicate": bill}
    with tempfile.TemporaryDirectory(prefix="push-", dir=job.archive.parent) as folder:
        context = Path(folder)
        (context / STATEMENT).write_text(json.dumps(statement), "utf-8")
        try:
            _run(root, job, scanner_argv(job, scanner, context))
            yield scanner
        finally:
            engine.remove(scanner)


def _run(root: Path, job: Job, argv: tuple[str, ...]) -> None:
    finished = docker.stream(argv, cwd=root)
    if finished.code != 0:
        raise explain_failure(job.cell, finished.lines)


def _push(root: Path, reference: str, index: str) -> None:
    """Pushes with the docker command, which has the credentials, and then asks the registry for that index."""
    finished = docker.stream(("docker", "push", "--quiet", reference), cwd=root)
    if finished.code != 0:
        host = reference.partition("/")[0]
        message = f"image was not pushed: {reference}: {(finished.lines or ('it said nothing',))[-1].strip()}"
        raise BuildError(message, hint=f"does the registry answer, and may you write there? docker login {host}")
    repository = reference.rpartition(":")[0]
    asked = docker.capture(("docker", "buildx", "imagetools", "inspect", f"{repository}@{index}"), cwd=root)
    if asked.code != 0:
        message = f"the registry does not have what was pushed: {repository}@{index}: {' '.join(asked.lines)}"
        raise BuildError(message, hint="an engine without the containerd image store pushes something else")
