"""Step 3: Cell -> buildx argv (pure), and running it.

The image always leaves BuildKit as an OCI archive and enters the engine by `load`: every other exporter conflicts with
rewrite-timestamp on the containerd store, and so what runs is what was compared. Nothing stays behind when it fails.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from images import docker
from images.errors import ArchiveError, BuildError, MatrixError, UsageError, VerificationError
from images.layers import oci
from images.layers.integrity import MANIFEST
from images.matrix import render, timing
from images.matrix.drift import drift
from images.matrix.matrix import Cell, Platform
from images.matrix.publisher import Publisher
from images.pins import debian

T = TypeVar("T")
ARCHIVES = Path(".make/images")
# 2026-01-01T00:00:00Z. Without git there is no date to take; any fixed one gives the same bytes twice.
FALLBACK_EPOCH_S = 1767225600
REGISTRY_TIMEOUT_S = 8.0
BUILD_ID_DIGITS = 32
BUILD_ID_LABEL = "io.appliance.build-id"
REVISION_LABEL = "org.opencontainers.image.revision"
CELL_LABEL = "io.appliance.cell"
RECIPE_LABEL = "io.appliance.recipe"  # on a model image, which is a cell and one more layer
BASE_OVERRIDE_LABEL = "io.appliance.base-override"
# `no` on images of other Debian packages than the lock's: another day gives others. Absent otherwise.
REPRODUCIBLE_LABEL = "io.appliance.reproducible"
NO_ATTESTATIONS = ("--provenance=false", "--sbom=false")
FILES_LABEL = "io.appliance.files-sha256"  # hash of the file manifest in the image
FILES_TARGET = "files-manifest"
TOOLKIT_LABEL = "io.appliance.toolkit"  # on an image that is nothing else
TOOLKIT_OVERRIDE_LABEL = "io.appliance.toolkit-override"  # on images built with another toolkit image
DISK_FULL = ("no space left on device", "disk quota exceeded")
# What docker says to `buildx build --progress` when it has no such plugin.
NO_BUILDX = ("unknown flag: --progress", "unknown command: docker buildx", "'buildx' is not a docker command")
NO_BASE = ("failed to resolve source metadata", "pull access denied", "failed to do request", "failed to authorize")
# What apt says of files that are not those of the archive's signed list, and of files that it could not get.
LIES = ("hash sum mismatch", "file has unexpected size", "is not signed", "gpg error", "clearsigned file isn't valid")
NOT_FETCHED = re.compile(
    r"\b[EW]: (?:Failed to fetch |The repository '.*' (?:does not have|no longer has) a Release file|"
    r"Unable to locate package |Package '.*' has no installation candidate)"
)
APT_STEPS = ("apt-get ", "/run/asked/script")  # in BuildKit's report of the failed step
OTHER_ARCHIVE = "--debian-mirror http://deb.debian.org takes what Debian's own hosts have now"


@dataclass(frozen=True, kw_only=True)
class BaseChoice:
    """The base of a build. `context` replaces the FROM string if it is given; `identity` is a digest."""

    identity: str
    context: str | None = None
    override: str | None = None  # set if this is not the pinned base; recorded in a label
    is_asked: bool = True  # False: a dry run's, which asks no registry whether the pinned base can be had

    def describe(self, cell: Cell) -> str:
        if self.override is None:
            doubt = "" if self.is_asked else "; a dry run asks no registry whether it has it"
            return f"base: {cell.base.reference} (pinned, {cell.base.status}){doubt}"
        return f"base: {self.override} ({self.identity}) instead of {cell.base.reference}"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Commit and date of the sources. Without git `revision` is None and the date is a fixed one."""

    epoch_s: int
    revision: str | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices of the command line."""

    base: str | None = None  # None: the pinned one; "auto": whichever is there; else an image name
    toolkit_image: str | None = None  # None: the pinned one
    ca_bundle: Path | None = None
    tag: str | None = None
    epoch_s: int | None = None
    index_url: str | None = None  # of wheels; None: PyPI
    publisher: Publisher = Publisher()
    wheels: Path | None = None  # a folder with those that PyPI does not have; None: their own index
    no_cache: bool = False
    force: bool = False
    space_check: bool = True
    cache_from: tuple[str, ...] = ()  # as buildx takes them: type=local,src=DIR
    cache_to: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A build with all of its values decided."""

    cell: Cell
    base: BaseChoice
    origin: Origin
    build_id: str
    version: str  # of this project
    tag: str
    archive: Path
    ca_bundle: Path | None = None
    no_cache: bool = False
    cache_from: tuple[str, ...] = ()
    cache_to: tuple[str, ...] = ()
    attest: tuple[str, ...] = ()  # what to say about the image beside it; nothing of that goes into its manifest
    toolkit: BaseChoice | None = None  # instead of the image that the toolkit is taken from
    variant: Path | None = None  # a Dockerfile that is built instead of the cell's, made from it
    contexts: tuple[str, ...] = ()  # beside the project itself, as buildx takes them: name=DIR
    index_url: str | None = None  # of wheels; None: PyPI
    wheels: Path | None = None  # where those that are not on PyPI lie; None: their own index is asked
    secrets: tuple[str, ...] = ()  # beside certificates, likewise: id=NAME,src=FILE
    lock: debian.Lock | None = None  # of its Debian packages
    publisher: Publisher = Publisher()
    files_sha256: str | None = None  # None: not known before its steps have run
    inputs: Mapping[str, str] = field(default_factory=dict)  # digests of the files that it was planned with
    is_locked: bool = True  # False: `lock` is a temporary one, of what the archive had when the build began
    kept_stages: tuple[str, ...] = ()  # stages with a cached RUN when they were sealed

    @property
    def dockerfile(self) -> Path:
        return self.variant or self.cell.folder / "Dockerfile"


@dataclass(frozen=True, kw_only=True)
class Built:
    cell: str
    tag: str
    build_id: str
    digest: str  # digest of the image's manifest
    is_reused: bool


def plan_job(
    root: Path,
    cell: Cell,
    options: Options,
    base: BaseChoice,
    toolkit: BaseChoice | None = None,
    *,
    platform: Platform | None = None,
) -> Job:
    """Plans a build: reads its inputs below `root` and asks git. `platform` is that of its Debian lock."""
    files = render.render(cell, render.load_template(root, cell))
    _refuse_drift(root, cell, files)
    lock = debian.load(root, cell.base, platform) if platform in cell.platforms and platform else None
    return Job(
        cell=cell,
        base=base,
        toolkit=toolkit,
        origin=query_origin(root, cell, epoch_s=options.epoch_s, lock=lock),
        build_id=_build_id(root, cell, base, toolkit, lock),
        lock=lock,
        version=_project_version(root),
        tag=options.tag or cell.tag,
        archive=root / ARCHIVES / f"{cell.id}.oci.tar",
        ca_bundle=options.ca_bundle,
        index_url=options.index_url,
        publisher=options.publisher,
        no_cache=options.no_cache,
        cache_from=options.cache_from,
        cache_to=options.cache_to,
        inputs=digests_of(root, cell),
    )


def relock(root: Path, job: Job, lock: debian.Lock) -> Job:
    """Returns the job with a temporary lock in the lock's place."""
    found = _build_id(root, job.cell, job.base, job.toolkit, lock)
    return replace(job, lock=lock, is_locked=False, build_id=found)


def buildx_argv(job: Job) -> tuple[str, ...]:
    """Returns the whole command. Its last word is the context, the project's root."""
    return (
        *("docker", "buildx", "build", "--progress", "plain"),
        *((word for each in job.attest for word in ("--attest", each)) if job.attest else NO_ATTESTATIONS),
        *("--file", job.dockerfile.as_posix()),
        *_pairs("--build-arg", {"APPLIANCE_BUILD_ID": job.build_id, "SOURCE_DATE_EPOCH": str(job.origin.epoch_s)}),
        *_pairs("--label", moment_labels(job)),
        *(("--secret", f"id=ca,src={job.ca_bundle}") if job.ca_bundle else ()),
        *(word for secret in job.secrets for word in ("--secret", secret)),
        *(("--build-context", f"{job.cell.base.reference}={job.base.context}") if job.base.context else ()),
        *(("--build-context", _toolkit_context(job)) if job.toolkit else ()),
        *(word for context in job.contexts for word in ("--build-context", context)),
        *(("--no-cache",) if job.no_cache else ()),
        *(word for place in job.cache_from for word in ("--cache-from", place)),
        *(word for place in job.cache_to for word in ("--cache-to", place)),
        *("--output", f"type=oci,name={job.tag},dest={job.archive},rewrite-timestamp=true,oci-mediatypes=true"),
        ".",
    )


def targeted_argv(job: Job, target: str, output: str) -> tuple[str, ...]:
    """Returns the command that builds up to one stage and writes that stage's files to `output`."""
    words = buildx_argv(replace(job, attest=(), cache_to=()))
    at = words.index("--output")
    return (*words[:at], "--target", target, "--output", output, *words[at + 2 :])


@contextmanager
def extended(root: Path, job: Job, more: str) -> Iterator[tuple[Job, Path]]:
    """Returns the job with these stages added to its Dockerfile, and a folder for their output."""
    folder = root / job.archive.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stages-", dir=folder) as name:
        own = Path(name) / "Dockerfile"
        own.write_text(f"{(root / job.dockerfile).read_text('utf-8')}\n{more}\n", "utf-8")
        ignore = root / f"{job.dockerfile}.dockerignore"
        if ignore.is_file():
            shutil.copyfile(ignore, f"{own}.dockerignore")
        yield replace(job, variant=own), Path(name) / "out"


def seal(root: Path, job: Job) -> Job:
    """Runs every step and puts the hash of the file manifest into the job. Without a manifest the job is unchanged.

    No label can be made of a step's output, so the image is exported afterwards, from the cache. Raises BuildError if a
    step fails.
    """
    text = (root / job.dockerfile).read_text("utf-8")
    if f"/{MANIFEST}" not in text:
        return job
    last = debian.STAGE.split(text)[-2]
    stage = f"FROM scratch AS {FILES_TARGET}\nCOPY --from={last} /{MANIFEST} /"
    with extended(root, job, stage) as (longer, out):
        finished = docker.stream(targeted_argv(longer, FILES_TARGET, f"type=local,dest={out}"), cwd=root)
        if finished.code != 0:
            raise explain_failure(job.cell, finished.lines)
        sha256 = hashlib.sha256((out / Path(MANIFEST).name).read_bytes()).hexdigest()
    return replace(job, files_sha256=sha256, no_cache=False, kept_stages=finished.kept_stages)


def moment_labels(job: Job) -> dict[str, str]:
    """Returns the labels that the matrix cannot know. An unknown revision has no label."""
    created = datetime.fromtimestamp(job.origin.epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    labels = {
        BASE_OVERRIDE_LABEL: job.base.override or render.NONE,
        BUILD_ID_LABEL: job.build_id,
        "org.opencontainers.image.created": created,
        "org.opencontainers.image.version": job.version,
        **job.publisher.labels,
        **({FILES_LABEL: job.files_sha256} if job.files_sha256 else {}),
    }
    if job.origin.revision:
        labels[REVISION_LABEL] = job.origin.revision
    if not job.is_locked:
        labels[REPRODUCIBLE_LABEL] = "no"
    if job.toolkit:
        labels[TOOLKIT_OVERRIDE_LABEL] = f"{job.toolkit.override} {job.toolkit.identity}"
        labels[render.TOOLKIT_SOURCE_LABEL] = labels[TOOLKIT_OVERRIDE_LABEL]  # not the one that the Dockerfile names
    if job.base.override:
        labels["org.opencontainers.image.base.name"] = job.base.override
        labels["org.opencontainers.image.base.digest"] = job.base.identity
    return labels


def build(root: Path, job: Job, engine: docker.Engine) -> Built:
    """Runs the build, loads the result and keeps its duration. Raises BuildError; the archive is gone either way."""
    refuse_engine(job, engine)
    began_s = time.monotonic()
    job.archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        sealed = seal(root, job)
        refuse_moved(root, job)
        finished = docker.stream(buildx_argv(sealed), cwd=root)
        if finished.code != 0:
            raise explain_failure(job.cell, finished.lines)
        refuse_moved(root, job)
        digest = manifest_digest(job.archive)
        compressed_bytes = _of_archive(job.archive, lambda tar: oci.compressed_bytes(oci.manifest_of(tar)))
        engine.load(job.archive)
    finally:
        job.archive.unlink(missing_ok=True)
    kept = sealed.kept_stages if sealed.files_sha256 else finished.kept_stages
    took = timing.Took(
        digest=digest, seconds=round(time.monotonic() - began_s), kept=kept, compressed_bytes=compressed_bytes
    )
    timing.save(job.archive.parent, job.build_id, took)
    return Built(cell=job.cell.id, tag=job.tag, build_id=job.build_id, digest=digest, is_reused=False)


def refuse_moved(root: Path, job: Job) -> None:
    """Raises BuildError if files changed after build id and labels were made: BuildKit reads the tree anew each run."""
    now = digests_of(root, job.cell) if job.inputs else {}
    moved = sorted(path for path in {*job.inputs, *now} if job.inputs.get(path) != now.get(path))
    if not moved:
        return
    more = f" and {len(moved) - 5} more" if len(moved) > 5 else ""
    message = f"cell {job.cell.id} was not built: the tree was edited meanwhile: {', '.join(moved[:5])}{more}"
    raise BuildError(message, hint="build it again; git worktree add gives a tree that nobody edits")


def refuse_platform(cells: Iterable[Cell], platform: str, *, done: str = "built") -> None:
    """Raises BuildError naming every cell for other machines, before the first build begins."""
    foreign = [cell for cell in cells if platform not in cell.platforms]
    if not foreign:
        return
    names = ", ".join(cell.id for cell in foreign)
    others = ", ".join(sorted({each for cell in foreign for each in cell.platforms}))
    if len(foreign) == 1:
        message = f"cell {names} cannot be {done} here: the engine is {platform}"
        raise BuildError(message, hint=f"it is for {others}; BuildKit would only relabel files of this machine")
    message = f"{len(foreign)} cells cannot be {done} here, where the engine is {platform}: {names}"
    raise BuildError(message, hint=f"they are for {others}; name the others with --only, or go to such a machine")


def refuse_engine(job: Job, engine: docker.Engine) -> None:
    """Raises BuildError for an engine that cannot build this cell, or cannot keep what it built."""
    refuse_platform((job.cell,), engine.platform)
    refuse_store(engine.image_store)


def refuse_store(image_store: str) -> None:
    """Raises BuildError for an engine without the containerd image store: only there is an id the manifest's digest."""
    if image_store.startswith("io.containerd."):
        return
    message = f"Docker keeps its images in a store that can neither export nor load what is built here: {image_store}"
    raise BuildError(
        message,
        hint='turn on the containerd image store: {"features": {"containerd-snapshotter": true}} in '
        "/etc/docker/daemon.json and a restart of Docker, or in Docker Desktop's settings under General",
    )


def find_built(job: Job, engine: docker.Engine) -> Built | None:
    """Returns an image of the same inputs and publisher, tagged with this job's tag from now on; None without one."""
    known = engine.images_labelled({BUILD_ID_LABEL: job.build_id, CELL_LABEL: job.cell.id})
    cells = (image for image in known if RECIPE_LABEL not in image.labels)
    found = [image for image in cells if job.publisher.is_of(image.labels)]
    if not found:
        return None
    if not any(_same_name(job.tag, tag) for image in found for tag in image.tags):
        engine.tag(found[0].id, job.tag)
    return Built(cell=job.cell.id, tag=job.tag, build_id=job.build_id, digest=found[0].id, is_reused=True)


def choose_base(cell: Cell, wanted: str | None, engine: docker.Engine, *, is_dry: bool = False) -> BaseChoice:
    """Returns the base to build on. `auto` is the pinned base, else an image of its name that is here.

    A dry run asks no registry: its `auto` is the pinned base. Raises BuildError if the wanted base cannot be had.
    """
    if wanted == "auto":
        return _auto_base(cell, engine, is_dry=is_dry)
    if wanted is not None:
        return _local_base(cell, wanted, engine.image(wanted))
    if cell.base.digest is None:
        message = f"cell {cell.id}: its base has no digest yet: {cell.base.image}"
        raise BuildError(
            message, hint="python -m images lock --bases asks a registry; --base IMAGE takes one that is here"
        )
    return BaseChoice(identity=cell.base.digest)


def _auto_base(cell: Cell, engine: docker.Engine, *, is_dry: bool) -> BaseChoice:
    here = _image_for_dry_run(engine, cell.base.image) if is_dry else engine.image(cell.base.image)
    pinned = cell.base.digest
    if pinned and here and (here.id == pinned or any(digest.endswith(pinned) for digest in here.digests)):
        # By its name and as a context: BuildKit asks a registry for a digest even when the engine has it.
        return BaseChoice(identity=pinned, context=f"docker-image://{cell.base.image}")
    if pinned and is_dry:
        return BaseChoice(identity=pinned, is_asked=False)
    if pinned and docker.registry_has(cell.base.reference, timeout_s=REGISTRY_TIMEOUT_S):
        return BaseChoice(identity=pinned)
    if here:
        return _local_base(cell, cell.base.image, here)
    message = f"cell {cell.id}: no base to build on: no registry answers for {cell.base.reference}, and it is not here"
    raise BuildError(message, hint=f"docker pull {cell.base.image}, or name an image that is here: --base IMAGE")


def _image_for_dry_run(engine: docker.Engine, name: str) -> docker.Image | None:
    """Returns the image if it is here. Without an engine it returns None, since a command can still be shown."""
    try:
        return engine.image(name)
    except BuildError:
        return None


def _local_base(cell: Cell, name: str, image: docker.Image | None) -> BaseChoice:
    if image is None:
        message = f"cell {cell.id}: the base is not among the engine's images: {name}"
        raise BuildError(message, hint=f"docker pull {name}, or --base auto")
    is_pinned = image.id == cell.base.digest
    return BaseChoice(identity=image.id, context=f"docker-image://{name}", override=None if is_pinned else name)


def choose_toolkit(cell: Cell, wanted: str | None, engine: docker.Engine) -> BaseChoice | None:
    """Returns the image that replaces the matrix's toolkit. None means the matrix's own, by its digest.

    Raises UsageError for a cell whose toolkit comes from no image, BuildError if the wanted one is not here.
    """
    if wanted is None:
        return None
    if cell.toolkit is None or cell.toolkit.image is None:
        source = cell.toolkit.source if cell.toolkit else "it has none"
        message = f"--toolkit-image fits no cell whose CUDA toolkit comes from no image: {cell.id}: {source}"
        raise UsageError(message, hint="choose cells of CUDA 12.8 or 12.9 with --only")
    image = engine.image(wanted)
    if image is None:
        message = f"cell {cell.id}: the toolkit's image is not among the engine's images: {wanted}"
        raise BuildError(message, hint=f"docker pull {wanted}")
    name = image.labels.get(TOOLKIT_LABEL, wanted)  # an image that was made here describes itself
    return BaseChoice(identity=image.id, context=f"docker-image://{wanted}", override=name)


def other_toolkit(cell: Cell, labels: Mapping[str, str]) -> str | None:
    """Returns name and digest of the toolkit that replaced the matrix's, by the image's label.

    None if nothing replaced it, or only its name differs.
    """
    said = labels.get(TOOLKIT_OVERRIDE_LABEL)
    pinned = cell.toolkit.image.digest if cell.toolkit and cell.toolkit.image else None
    return None if said is None or said.rpartition(" ")[2] == pinned else said


def other_base(labels: Mapping[str, str]) -> str | None:
    """Returns name and digest of the image that replaced the pinned base."""
    if labels.get(BASE_OVERRIDE_LABEL, render.NONE) == render.NONE:
        return None
    return " ".join(labels.get(f"org.opencontainers.image.base.{part}", "?") for part in ("name", "digest"))


def _toolkit_context(job: Job) -> str:
    image = job.cell.toolkit.image if job.cell.toolkit else None
    if image is None or job.toolkit is None:
        message = f"cell {job.cell.id} takes its toolkit from no image"
        raise BuildError(message)
    return f"{image.reference}={job.toolkit.context}"


def read_inputs(root: Path, cell: Cell) -> dict[str, bytes]:
    """Returns every file that decides the image's content, by path. Raises MatrixError if one is missing."""
    folder = [cell.folder / name for name in ("Dockerfile", "image_facts.json")]
    files: dict[str, bytes] = {}
    for path in (*render.inputs(cell), *folder):
        if not (root / path).exists():
            message = f"cell {cell.id}: an input of its build is missing: {path}"
            raise MatrixError(message, hint=f"committed files are made by: {render.RENDER_COMMAND}")
        files.update({file.relative_to(root).as_posix(): file.read_bytes() for file in _files(root / path)})
    return files


def digests_of(root: Path, cell: Cell) -> dict[str, str]:
    """Returns the SHA-256 of each file of `read_inputs`, by path."""
    return {path: hashlib.sha256(data).hexdigest() for path, data in read_inputs(root, cell).items()}


def parts_of(root: Path, cell: Cell) -> set[str]:
    """Returns the sets of packages that the cell's stages install, as a Debian lock names them."""
    return set(debian.asked((root / cell.folder / "Dockerfile").read_text("utf-8")).values())


def _build_id(root: Path, cell: Cell, base: BaseChoice, toolkit: BaseChoice | None, lock: debian.Lock | None) -> str:
    return build_id_of(root, cell, base.identity, toolkit.identity if toolkit else None, lock=lock)


def build_id_of(root: Path, cell: Cell, base: str, toolkit: str | None, *, lock: debian.Lock | None) -> str:
    """Returns the build id for a base and a toolkit, given by their digests. None means the matrix's toolkit.

    Only the part of the lock that this cell installs counts: other packages and a younger date make no other image.
    """
    files = read_inputs(root, cell)
    if lock:
        files[debian.path_for(cell.base, lock.platform).as_posix()] = debian.content(lock, parts_of(root, cell))
    return build_id(files, " ".join(filter(None, (base, toolkit))))


def _files(path: Path) -> Iterator[Path]:
    """Yields the files of a path that its .dockerignore lets into the context."""
    if path.is_file():
        yield path
        return
    for file in path.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc":
            yield file


def build_id(files: Mapping[str, bytes], base_identity: str) -> str:
    """Returns a hash of all inputs by name and content, and of the base. It names caches and profiles on the volume."""
    total = hashlib.sha256(f"base {base_identity}\n".encode())
    for path in sorted(files):
        total.update(f"{hashlib.sha256(files[path]).hexdigest()} {path}\n".encode())
    return total.hexdigest()[:BUILD_ID_DIGITS]


def query_origin(root: Path, cell: Cell, *, epoch_s: int | None, lock: debian.Lock | None = None) -> Origin:
    """Returns the last commit that touched the inputs, with `+dirty` if the working tree differs.

    Raises BuildError if a shallow clone cannot know that commit, or an input is not git's.
    """
    locks = [debian.path_for(cell.base, lock.platform)] if lock else []
    paths = [path.as_posix() for path in (*render.inputs(cell), cell.folder, *locks)]
    log = docker.capture(("git", "log", "-1", "--format=%H %ct", "--", *paths), cwd=root)
    status = docker.capture(("git", "status", "--porcelain", "--", *paths), cwd=root)
    found = parse_git_log(log.lines[0]) if log.code == 0 and log.lines else None
    revision, date_s = found if found else (None, FALLBACK_EPOCH_S)
    if revision:
        _refuse_shallow(root, revision)
        _refuse_untracked(root, paths)
    if revision and status.lines:
        revision += "+dirty"
    return Origin(epoch_s=date_s if epoch_s is None else epoch_s, revision=revision)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Verdict of git about the revision that an image claims. `is_false` is False if git cannot tell."""

    is_false: bool
    words: str


def query_revision(root: Path, cell: Cell, revision: str | None, *, lock: debian.Lock | None = None) -> Judged:
    """Compares the inputs of that commit with this tree, for an image that has this tree's build id."""
    if revision is None:
        return Judged(is_false=False, words="no revision is told, as of a build without git")
    commit = revision.removesuffix("+dirty")
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        return Judged(is_false=True, words=f"{revision[:80]}: no commit")
    locks = [debian.path_for(cell.base, lock.platform)] if lock else []
    paths = [path.as_posix() for path in (*render.inputs(cell), cell.folder, *locks)]
    if docker.capture(("git", "rev-parse", "--git-dir"), cwd=root).code != 0:
        return Judged(is_false=False, words=f"{revision}, which cannot be checked without git")
    if docker.capture(("git", "cat-file", "-e", f"{commit}^{{commit}}"), cwd=root).code != 0:
        asked = docker.capture(("git", "rev-parse", "--is-shallow-repository"), cwd=root)
        is_shallow = asked.lines[:1] == ("true",)
        words = "which a shallow clone cannot check" if is_shallow else "which is no commit of this repository"
        return Judged(is_false=not is_shallow, words=f"{revision}, {words}")
    if revision != commit:
        return Judged(is_false=False, words=f"{revision}: built of a tree that differed from the commit")
    differing = docker.capture(("git", "diff", "--name-only", commit, "--", *paths), cwd=root)
    if differing.code == 0 and not differing.lines:
        return Judged(is_false=False, words=revision)
    named = ", ".join(differing.lines[:3]) or "git diff failed"
    return Judged(is_false=True, words=f"{revision}, whose inputs are others than this image's: {named}")


def _refuse_shallow(root: Path, revision: str) -> None:
    """Raises BuildError if the commit is where a shallow clone ends.

    Git takes every file for new there, so the date would be that of another commit.
    """
    asked = docker.capture(("git", "rev-parse", "--git-path", "shallow"), cwd=root)
    ends = root / asked.lines[0] if asked.code == 0 and asked.lines else None
    if ends and ends.is_file() and revision in ends.read_text("ascii").split():
        message = f"this clone is shallow and ends at {revision[:12]}: when the inputs were last changed is not in it"
        raise BuildError(message, hint="git fetch --unshallow; the date of that commit is in the image's digest")


def _refuse_untracked(root: Path, paths: Sequence[str]) -> None:
    """Refuses inputs that git does not have, even ignored ones: they would be in the image and in no commit."""
    words = ("git", "-c", "core.quotePath=false", "ls-files", "--others", "--", *paths)
    asked = docker.capture(words, cwd=root)
    found = [line for line in asked.lines if "__pycache__" not in Path(line).parts and Path(line).suffix != ".pyc"]
    if asked.code == 0 and found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        message = f"not in git, and would be in the image: {', '.join(found[:5])}{more}"
        raise BuildError(message, hint=f"git add {shlex.quote(found[0])}, or take it away")


def parse_git_log(line: str) -> tuple[str, int] | None:
    """Parses `<40 digits> <seconds>`. None for anything else."""
    commit, _, date_s = line.partition(" ")
    return (commit, int(date_s)) if len(commit) == 40 and date_s.isdecimal() else None


def explain_failure(cell: Cell, lines: Iterable[str]) -> BuildError:
    """Returns the likely cause of a failed build, from its last lines."""
    said = list(lines)
    errors = [line for line in said if "ERROR" in line or line.startswith("error:")]
    last = (errors or said or ["it said nothing"])[-1].strip()
    text = "\n".join(said).lower()
    if any(sign in text for sign in DISK_FULL):
        message = f"cell {cell.id} was not built: the disk is full: {last}"
        return BuildError(
            message, hint="python -m images prune [--cache] gives space back; docker system df says how much"
        )
    if any(sign in text for sign in NO_BUILDX):
        message = f"cell {cell.id} was not built: this docker has no buildx"
        return BuildError(message, hint="install the plugin: docker buildx version must answer")
    if any(sign in text for sign in NO_BASE):
        toolkit = cell.toolkit.image if cell.toolkit else None
        if toolkit and toolkit.image in last:
            message = f"cell {cell.id} was not built: the image of its CUDA toolkit cannot be had: {last}"
            return BuildError(
                message, hint="--toolkit-image takes one that is here; CUDA 12.4, 13.0 and 13.4 need none"
            )
        message = f"cell {cell.id} was not built: its base cannot be had: {last}"
        return BuildError(message, hint="--base auto takes an image that is here")
    if any(step in last for step in APT_STEPS):
        return _explain_apt(cell, said, last)
    if "certificate" in text:
        message = f"cell {cell.id} was not built: a certificate was refused: {last}"
        return BuildError(message, hint="behind an intercepting proxy give its certificates: --ca-bundle FILE")
    return BuildError(f"cell {cell.id} was not built: {last}", hint="the cause stands in the lines above")


def _explain_apt(cell: Cell, said: Sequence[str], last: str) -> BuildError:
    """Returns the error of the step that failed. Warnings of earlier steps are no cause: apt goes on after them."""
    lie = next((line for line in said if any(sign in line.lower() for sign in LIES)), None)
    if lie:
        message = f"cell {cell.id} was not built: an archive gave other bytes than its signed list names: {lie.strip()}"
        return BuildError(message, hint=f"a damaged mirror, or a proxy before it? {OTHER_ARCHIVE}")
    unfetched = next((line for line in said if NOT_FETCHED.search(line)), None)
    if unfetched:
        message = f"cell {cell.id} was not built: its Debian packages could not be had: {unfetched.strip()}"
        return ArchiveError(message, hint=f"is the archive reachable from a build? {OTHER_ARCHIVE}")
    return BuildError(f"cell {cell.id} was not built: {last}", hint="the cause stands in the lines above")


def manifest_digest(archive: Path) -> str:
    """Returns the digest of the image that buildx wrote. Raises BuildError if the output is not one image."""
    return _of_archive(archive, lambda tar: oci.read(tar).manifest)


def _of_archive(archive: Path, read: Callable[[tarfile.TarFile], T]) -> T:
    try:
        with oci.opened(archive) as tar:
            return read(tar)
    except VerificationError as error:
        message = f"buildx left something else than one image: {error.message}"
        raise BuildError(message, hint="is the disk full? what buildx itself said stands above") from error


def check_ca_bundle(path: Path | None) -> Path | None:
    """Raises UsageError unless the file holds certificates; an empty one would be ignored in silence."""
    if path is None:
        return None
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        message = f"--ca-bundle cannot be read: {path}: {error.strerror}"
        raise UsageError(message) from error
    if "-----BEGIN CERTIFICATE-----" not in text:
        message = f"--ca-bundle holds no certificate: {path}"
        raise UsageError(message, hint="it must be a PEM file")
    return path.resolve()


def _refuse_drift(root: Path, cell: Cell, files: Mapping[Path, str]) -> None:
    lines = drift(root, files)
    if lines:
        message = f"cell {cell.id}: the committed files are not what the matrix renders: {'; '.join(lines)}"
        raise BuildError(message, hint=render.RENDER_COMMAND)


def _project_version(root: Path) -> str:
    return str(tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def _pairs(flag: str, values: Mapping[str, str]) -> Iterator[str]:
    for name, value in values.items():
        yield from (flag, f"{name}={value}")


def _same_name(wanted: str, tag: str) -> bool:
    return tag in (wanted, f"docker.io/library/{wanted}", f"{wanted}:latest")
