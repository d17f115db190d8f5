from __future__ import annotations

import hashlib
import io
import itertools
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images import docker
from images.build import build, mirror
from images.errors import ArchiveError, BuildError, MatrixError, UsageError
from images.matrix import matrix, render
from images.matrix.drift import write
from images.matrix.matrix import Cell
from images.pins import debian

LOCAL = "sha256:" + "1" * 64
MANIFEST = b'{"layers": []}'


def test_the_argv_exports_an_archive_that_can_be_compared(job: build.Job) -> None:
    argv = build.buildx_argv(job)
    output = argv[argv.index("--output") + 1]
    assert output == f"type=oci,name=appliance:llama-cpu,dest={job.archive},rewrite-timestamp=true,oci-mediatypes=true"
    assert "--provenance=false" in argv
    assert argv[-1] == "."
    assert "SOURCE_DATE_EPOCH=1700000000" in argv
    assert "org.opencontainers.image.created=2023-11-14T22:13:20Z" in argv
    assert not {"--secret", "--build-context", "--no-cache"} & set(argv)


def test_certificates_go_in_as_a_secret(job: build.Job) -> None:
    argv = build.buildx_argv(replace(job, ca_bundle=Path("/etc/ca.pem"), no_cache=True))
    assert argv[argv.index("--secret") + 1] == "id=ca,src=/etc/ca.pem"
    assert "--no-cache" in argv


def test_caches_are_read_and_written_where_they_are_named(job: build.Job) -> None:
    given = replace(job, cache_from=("type=local,src=a", "type=local,src=b"), cache_to=("type=local,dest=c",))
    argv = build.buildx_argv(given)
    pairs = list(itertools.pairwise(argv))
    assert [value for flag, value in pairs if flag == "--cache-from"] == ["type=local,src=a", "type=local,src=b"]
    assert [value for flag, value in pairs if flag == "--cache-to"] == ["type=local,dest=c"]
    assert not {"--cache-from", "--cache-to"} & set(build.buildx_argv(job))


def test_another_base_replaces_the_literal_from_and_is_recorded(job: build.Job, project: Path) -> None:
    base = build.BaseChoice(identity=LOCAL, context="docker-image://debian:bookworm-slim", override="debian:mine")
    argv = build.buildx_argv(replace(job, base=base))
    key, _, value = argv[argv.index("--build-context") + 1].partition("=")
    assert value == "docker-image://debian:bookworm-slim"
    dockerfile = render.render(job.cell, render.load_template(project, job.cell))[job.cell.folder / "Dockerfile"]
    assert f"FROM {key} AS" in dockerfile
    assert "io.appliance.base-override=debian:mine" in argv
    assert f"org.opencontainers.image.base.digest={LOCAL}" in argv


def test_another_toolkit_image_replaces_the_literal_from_and_is_recorded(job: build.Job, project: Path) -> None:
    cell = matrix.select(matrix.load(project).cells, "llama-cu128-sm90")[0]
    toolkit = build.BaseChoice(identity=LOCAL, context="docker-image://cuda:mine", override="cuda:mine")
    given = replace(job, cell=cell, toolkit=toolkit)
    argv = build.buildx_argv(given)
    key, _, value = argv[argv.index("--build-context") + 1].partition("=")
    assert value == "docker-image://cuda:mine"
    assert key in (project / cell.folder / "Dockerfile").read_text("utf-8")
    assert f"io.appliance.toolkit-override=cuda:mine {LOCAL}" in argv
    assert f"io.appliance.cuda.toolkit=cuda:mine {LOCAL}" in argv
    assert not {"io.appliance.toolkit-override", "io.appliance.cuda.toolkit"} & set(build.moment_labels(job))


@pytest.mark.thorough
def test_another_base_is_told_by_the_labels(job: build.Job) -> None:
    base = build.BaseChoice(identity=LOCAL, override="debian:bookworm-slim")
    assert build.other_base(build.moment_labels(replace(job, base=base))) == f"debian:bookworm-slim {LOCAL}"
    assert build.other_base(build.moment_labels(job)) is None


def test_another_toolkit_image_is_another_build(project: Path) -> None:
    cell = matrix.select(matrix.load(project).cells, "llama-cu128-sm90")[0]
    base, toolkit = build.BaseChoice(identity=LOCAL), build.BaseChoice(identity=LOCAL, override="cuda:mine")
    jobs = [build.plan_job(project, cell, build.Options(), base, each) for each in (None, toolkit)]
    assert len({job.build_id for job in jobs}) == 2


def test_a_toolkit_from_elsewhere_has_no_image_to_replace(cell: Cell) -> None:
    assert build.choose_toolkit(cell, None, docker.Engine()) is None
    with pytest.raises(UsageError, match="fits no cell whose CUDA toolkit comes from no image: llama-cpu: it has none"):
        build.choose_toolkit(cell, "cuda:mine", docker.Engine())


def test_an_unknown_revision_has_no_label(job: build.Job) -> None:
    labels = build.moment_labels(replace(job, origin=build.Origin(epoch_s=0, revision=None)))
    assert "org.opencontainers.image.revision" not in labels
    assert labels["io.appliance.base-override"] == "none"


def test_the_build_id_moves_with_every_input_and_with_the_base() -> None:
    files = {"a": b"1", "b": b"2"}
    ids = {
        build.build_id(files, LOCAL),
        build.build_id({**files, "a": b"3"}, LOCAL),
        build.build_id({"a": b"1", "c": b"2"}, LOCAL),
        build.build_id(files, "sha256:" + "2" * 64),
    }
    assert len(ids) == 4
    assert build.build_id(dict(reversed(files.items())), LOCAL) in ids


@pytest.mark.thorough
def test_a_lock_is_in_the_build_id_and_a_temporary_one_takes_its_place(project: Path, cell: Cell) -> None:
    """With other packages the image is another one; with the same, of another day, it is not."""
    base = build.BaseChoice(identity=LOCAL)
    unlocked = build.plan_job(project, cell, build.Options(), base)
    job = build.plan_job(project, cell, build.Options(), base, platform="linux/amd64")
    assert job.lock
    assert job.lock == debian.load(project, cell.base, "linux/amd64")
    assert job.build_id != unlocked.build_id
    later = job.lock.model_copy(update={"archive_date": "2027-01-01T00:00:00Z", "snapshot": "20270101T000000Z"})
    assert build.relock(project, job, later).build_id == job.build_id
    part = next(iter(build.parts_of(project, cell)))
    name, was = next(iter(job.lock.parts[part].items()))
    moved = {**job.lock.parts, part: {**job.lock.parts[part], name: was.model_copy(update={"version": "9"})}}
    temporary = build.relock(project, job, job.lock.model_copy(update={"parts": moved}))
    assert temporary.build_id not in (job.build_id, unlocked.build_id)
    labels = [build.moment_labels(each).get("io.appliance.reproducible") for each in (job, temporary)]
    assert labels == [None, "no"]


def test_a_cell_of_another_platform_has_no_lock(project: Path) -> None:
    cell = matrix.select(matrix.load(project).cells, "llama-cu130-sm75")[0]
    base = build.BaseChoice(identity=LOCAL)
    assert build.plan_job(project, cell, build.Options(), base, platform="linux/arm64").lock is None


APT = "#9 2.1 E: Failed to fetch http://h/debian/pool/t/tini_1.deb  "


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        (f"{APT}404  Not Found [IP: 10.0.0.1 80]", ArchiveError, "could not be had: #9 2.1 E: Failed to fetch"),
        ("#9 W: Failed to fetch http://h/InRelease  Could not connect", ArchiveError, "Could not connect"),
        ("#9 E: Unable to locate package tini", ArchiveError, "Unable to locate package tini"),
        ("#9 E: The repository 'http://h b Release' does not have a Release file.", ArchiveError, "Release file"),
        (f"{APT}Hash Sum mismatch", BuildError, "gave other bytes than its signed list names"),
        (f"{APT}File has unexpected size (1 != 2)", BuildError, "gave other bytes than its signed list names"),
        ("#9 W: GPG error: http://h b InRelease: NO_PUBKEY 1", BuildError, "gave other bytes"),
    ],
)
def test_what_apt_could_not_get_is_told_from_what_it_was_given_wrongly(
    cell: Cell, line: str, kind: type[BuildError], said: str
) -> None:
    """Another archive is tried if apt could not get a package, never if apt was given a wrong one."""
    step = 'ERROR: failed to solve: process "/bin/sh -c apt-get update  && apt-get install -y x" did not complete: 100'
    error = build.explain_failure(cell, ["Get:1 ca-certificates", line, step])
    assert type(error) is kind
    assert (error.exit_code, said in error.message) == (60, True)
    words = (error.hint or "").split()
    mirror.parse_mirror(words[words.index("--debian-mirror") + 1])  # or a ConfigError


def test_a_list_that_apt_did_without_is_not_why_a_compiler_failed(cell: Cell) -> None:
    step = 'ERROR: failed to solve: process "/bin/sh -c cmake --build out" did not complete: 1'
    error = build.explain_failure(cell, ["#9 W: Failed to fetch http://h/InRelease  Could not connect", step])
    assert (type(error), "cmake --build out" in error.message) == (BuildError, True)


def test_inputs_are_what_the_dockerignore_lets_through(project: Path, cell: Cell) -> None:
    files = build.read_inputs(project, cell)
    assert {"images/locks/appliance.txt", "images/rendered/llama-cpu/Dockerfile", *cell.engine.patches} <= set(files)
    assert "appliance/image_facts.py" in files
    assert not [path for path in files if "__pycache__" in path or path.endswith(".pyc")]


def test_a_missing_input_is_named(tmp_path: Path, cell: Cell) -> None:
    with pytest.raises(MatrixError, match="an input of its build is missing: appliance"):
        build.read_inputs(tmp_path, cell)


def test_without_git_the_date_is_fixed_and_there_is_no_revision(tmp_path: Path, cell: Cell) -> None:
    origin = build.query_origin(tmp_path, cell, epoch_s=None)
    assert origin == build.Origin(epoch_s=build.FALLBACK_EPOCH_S, revision=None)
    assert build.query_origin(tmp_path, cell, epoch_s=5).epoch_s == 5


def test_the_last_commit_of_the_inputs_gives_the_date(tmp_path: Path, cell: Cell) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / "appliance").mkdir()
    (tmp_path / "appliance/x.py").write_text("1")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-q", "-m", "inputs", "--date", "@1600000000 +0000")
    (tmp_path / "README").write_text("not an input")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-q", "-m", "else")
    first = docker.capture(("git", "log", "--format=%H %ct", "--reverse"), cwd=tmp_path).lines[0].split()
    assert build.query_origin(tmp_path, cell, epoch_s=None) == build.Origin(epoch_s=int(first[1]), revision=first[0])
    (tmp_path / "appliance/x.py").write_text("2")
    assert build.query_origin(tmp_path, cell, epoch_s=None).revision == f"{first[0]}+dirty"


def test_a_revision_is_true_where_that_commit_gives_the_same_inputs(tmp_path: Path, cell: Cell) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / "appliance").mkdir()
    for number, path in enumerate(("appliance/x.py", "appliance/x.py", "README")):
        (tmp_path / path).write_text(str(number))
        _git(tmp_path, "add", "-A")
        _git(tmp_path, "commit", "-q", "-m", path)
    older, made, newer = docker.capture(("git", "log", "--format=%H", "--reverse"), cwd=tmp_path).lines

    def judged(revision: str | None) -> tuple[bool, str]:
        found = build.query_revision(tmp_path, cell, revision)
        return found.is_false, found.words

    assert judged(made) == (False, made)
    assert judged(newer) == (False, newer), "which changed no input"
    assert judged(older) == (True, f"{older}, whose inputs are others than this image's: appliance/x.py")
    assert judged("0" * 40) == (True, f"{'0' * 40}, which is no commit of this repository")
    assert judged("main") == (True, "main: no commit")
    assert judged(f"{made}+dirty") == (False, f"{made}+dirty: built of a tree that differed from the commit")
    assert judged(None) == (False, "no revision is told, as of a build without git")
    shallow = tmp_path / "shallow"
    _git(tmp_path, "clone", "-q", "--depth", "1", f"file://{tmp_path}", "shallow")
    assert build.query_revision(shallow, cell, older).words == f"{older}, which a shallow clone cannot check"
    bare = tmp_path.parent / "bare"
    bare.mkdir()
    assert build.query_revision(bare, cell, made).words == f"{made}, which cannot be checked without git"


@pytest.mark.thorough
def test_a_shallow_clone_gives_the_same_origin_or_none(tmp_path: Path, cell: Cell) -> None:
    """A shallow clone that contains the last commit of an input is as good as a whole one."""
    source = tmp_path / "source"
    (source / "appliance").mkdir(parents=True)
    _git(source, "init", "-q")
    for number, name in enumerate(("appliance/x.py", "appliance/x.py", "appliance/x.py", "README")):
        (source / name).write_text(str(number))
        _git(source, "add", "-A")
        _git(source, "commit", "-q", "-m", name)
    whole = build.query_origin(source, cell, epoch_s=None)
    for depth in (1, 3):
        _git(tmp_path, "clone", "-q", "--depth", str(depth), f"file://{source}", f"depth-{depth}")
    assert build.query_origin(tmp_path / "depth-3", cell, epoch_s=None) == whole
    with pytest.raises(BuildError, match="this clone is shallow and ends at ") as caught:
        build.query_origin(tmp_path / "depth-1", cell, epoch_s=None)
    assert (caught.value.exit_code, str(caught.value.hint).partition(";")[0]) == (60, "git fetch --unshallow")
    _git(tmp_path / "depth-1", "fetch", "-q", "--unshallow")
    assert build.query_origin(tmp_path / "depth-1", cell, epoch_s=None) == whole


@pytest.mark.thorough
@pytest.mark.parametrize("name", [".x.py.swp", "new.py", ".idea/workspace.xml"])
def test_a_file_that_is_not_gits_is_refused_also_when_it_is_ignored(tmp_path: Path, cell: Cell, name: str) -> None:
    (tmp_path / "appliance/__pycache__").mkdir(parents=True)
    for path, text in (("x.py", ""), ("__pycache__/x.pyc", ""), ("x.pyc", "")):
        (tmp_path / "appliance" / path).write_text(text)
    (tmp_path / ".gitignore").write_text("*.swp\n.idea\n__pycache__\n*.pyc\n")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-q", "-m", "x")
    assert build.query_origin(tmp_path, cell, epoch_s=None).revision
    stray = tmp_path / "appliance" / name
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("")
    with pytest.raises(BuildError, match=rf"^not in git, and would be in the image: appliance/{name}$") as caught:
        build.query_origin(tmp_path, cell, epoch_s=None)
    assert (caught.value.exit_code, caught.value.hint) == (60, f"git add appliance/{name}, or take it away")
    _git(tmp_path, "add", "--force", "-A")
    assert build.query_origin(tmp_path, cell, epoch_s=None).revision


@given(st.text())
def test_a_strange_git_answer_is_no_answer(line: str) -> None:
    assert build.parse_git_log(line) is None or len(line.split(" ")[0]) == 40


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ERROR: failed to solve: write /var/lib/x: no space left on device", "the disk is full"),
        ("ERROR: failed to solve: x: failed to resolve source metadata for docker.io/library/debian", "base cannot be"),
        ("unknown flag: --progress", "this docker has no buildx"),
        ("docker: unknown command: docker buildx", "this docker has no buildx"),
        ("#9 ERROR: SSL: CERTIFICATE_VERIFY_FAILED certificate verify failed", "a certificate was refused"),
        ("ERROR: failed to solve: process did not complete successfully: exit code: 1", "exit code: 1"),
    ],
)
def test_a_failed_build_is_explained(cell: Cell, line: str, said: str) -> None:
    error = build.explain_failure(cell, ["#1 something", line])
    assert error.exit_code == 60
    assert said in error.message
    assert error.hint


def test_a_toolkit_that_cannot_be_had_is_no_missing_base(project: Path) -> None:
    (cell,) = matrix.select(matrix.load(project).cells, "llama-cu128-sm89")
    assert cell.toolkit is not None
    assert cell.toolkit.image is not None
    line = f"ERROR: failed to solve: {cell.toolkit.image.reference}: failed to resolve source metadata for it"
    error = build.explain_failure(cell, [line])
    assert "the image of its CUDA toolkit cannot be had" in error.message
    assert str(error.hint).startswith("--toolkit-image")


def test_a_failed_build_that_said_nothing_is_explained_too(cell: Cell) -> None:
    assert "it said nothing" in build.explain_failure(cell, []).message


def test_cells_for_other_machines_are_all_named_before_one_is_built(project: Path, cell: Cell) -> None:
    cells = matrix.select(matrix.load(project).cells, "llama-cu130-*")
    build.refuse_platform([cell], "linux/amd64")
    with pytest.raises(BuildError) as caught:
        build.refuse_platform([cell, *cells], "linux/amd64")
    assert caught.value.exit_code == 60
    assert caught.value.message.endswith("llama-cu130-sm110, llama-cu130-sm121")
    assert caught.value.hint == "they are for linux/arm64; name the others with --only, or go to such a machine"
    with pytest.raises(BuildError, match="cell llama-cu130-sm75 cannot be verified here: the engine is linux/arm64"):
        build.refuse_platform(matrix.select(cells, "llama-cu130-sm75"), "linux/arm64", done="verified")


def test_the_digest_is_read_from_the_archive(tmp_path: Path) -> None:
    assert build.manifest_digest(_oci(tmp_path, images=1)) == f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"


@pytest.mark.parametrize("images", [0, 2])
def test_an_archive_of_several_images_is_a_failed_build(tmp_path: Path, images: int) -> None:
    with pytest.raises(BuildError, match=f"one image expected, and the archive holds {images}") as caught:
        build.manifest_digest(_oci(tmp_path, images=images))
    assert caught.value.exit_code == 60


def test_a_cut_archive_is_a_failed_build(tmp_path: Path) -> None:
    archive = _oci(tmp_path, images=1)
    archive.write_bytes(archive.read_bytes()[:300])
    with pytest.raises(BuildError, match=r"buildx left something else than one image: not an OCI archive: .*o\.tar"):
        build.manifest_digest(archive)


def test_a_bundle_without_certificates_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    empty.write_text("")
    with pytest.raises(UsageError, match="holds no certificate"):
        build.check_ca_bundle(empty)
    with pytest.raises(UsageError, match="cannot be read"):
        build.check_ca_bundle(tmp_path / "none")
    assert build.check_ca_bundle(None) is None


def test_an_unresolved_base_is_refused_without_one_that_is_here(cell: Cell) -> None:
    base = replace(cell.base, digest=None, status="unresolved")
    with pytest.raises(BuildError, match="has no digest yet") as caught:
        build.choose_base(replace(cell, base=base), None, docker.Engine())
    assert caught.value.hint is not None
    assert "--base" in caught.value.hint


def test_the_pinned_base_is_the_default(cell: Cell) -> None:
    choice = build.choose_base(cell, None, docker.Engine())
    assert choice == build.BaseChoice(identity=str(cell.base.digest))
    assert "unverified" in choice.describe(cell)


class Absent(docker.Engine):
    """No Docker is here."""

    def image(self, reference: str) -> docker.Image | None:
        message = f"the engine cannot inspect {reference}"
        raise BuildError(message)


def test_a_dry_run_takes_the_pinned_base_and_asks_nobody(cell: Cell) -> None:
    choice = build.choose_base(cell, "auto", Absent(), is_dry=True)
    assert choice == build.BaseChoice(identity=str(cell.base.digest), is_asked=False)
    assert choice.describe(cell).endswith("; a dry run asks no registry whether it has it")
    with pytest.raises(BuildError, match="the engine cannot inspect"):
        build.choose_base(cell, "auto", Absent())


def test_a_render_that_drifted_is_not_built(tmp_path: Path, project: Path, cell: Cell) -> None:
    template = render.TEMPLATES / f"{cell.template}.Dockerfile.j2"
    write(tmp_path, {template: (project / template).read_text("utf-8")})
    with pytest.raises(BuildError, match="not what the matrix renders"):
        build.plan_job(tmp_path, cell, build.Options(), build.BaseChoice(identity=LOCAL))


def _oci(folder: Path, *, images: int) -> Path:
    digest = hashlib.sha256(MANIFEST).hexdigest()
    index = json.dumps({"manifests": [{"digest": f"sha256:{digest}"}] * images}).encode()
    archive = folder / "o.tar"
    with tarfile.open(archive, "w") as tar:
        for name, data in {"index.json": index, f"blobs/sha256/{digest}": MANIFEST}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive


def _git(folder: Path, *argv: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = docker.capture(("git", *identity, *argv), cwd=folder)
    assert done.code == 0, done.lines


def test_an_engine_without_the_containerd_store_is_told_what_to_do() -> None:
    build.refuse_store("io.containerd.snapshotter.v1")
    with pytest.raises(BuildError) as caught:
        build.refuse_store("overlay2")
    assert caught.value.exit_code == 60
    assert caught.value.message.endswith(": overlay2")
    assert "containerd-snapshotter" in (caught.value.hint or "")
