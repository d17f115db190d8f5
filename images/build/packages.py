"""Chooses the archive of a build's Debian packages and the lock that they are held to.

The first choice is Debian's snapshot service at the moment of the lock, or what --debian-mirror names instead. If no
snapshot answers, it is the base's own sources as they are now, under a temporary lock of exact versions and hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from images import docker
from images.build import asked, build, index, installed, mirror, snapshot
from images.build.build import BUILD_ID_LABEL, REPRODUCIBLE_LABEL, Job
from images.build.mirror import Mirror
from images.errors import ArchiveError, BuildError
from images.matrix import render
from images.matrix.matrix import Base, Cell
from images.pins import debian

Say = Callable[[str], None]


class Archives:
    """Knowledge of one command about Debian's archives. The snapshot service is asked once, when it is first needed."""

    def __init__(
        self,
        service: str,
        *,
        given: Mirror | None = None,
        is_strict: bool = False,
        timeout_s: float = snapshot.TIMEOUT_S,
    ) -> None:
        self.service = service  # root of the snapshot service
        self.given = given  # the user's own archive
        self.is_strict = is_strict  # True if only packages of the lock will do
        self.timeout_s = timeout_s
        self.trouble: str | None = None  # reason why no snapshot is used
        self._is_asked = False

    def choose(self, base: Base, timestamp: str) -> Mirror | None:
        """Returns the archive to use, None for the base's own sources. Raises BuildError if only a snapshot will do."""
        if self.given:
            return self.given
        dated = Mirror(root=self.service, timestamp=timestamp)
        if not self._is_asked:
            self._is_asked = True
            self.trouble = snapshot.query(snapshot.address(dated, base), timeout_s=self.timeout_s)
        if self.trouble and self.is_strict:
            hint = "name another snapshot archive (--debian-mirror); without --locked, --push and --against "
            raise BuildError(self.reason, hint=f"{hint}the newest packages are taken")
        return None if self.trouble else dated

    @property
    def reason(self) -> str:
        """Reason why the packages come from no snapshot."""
        if self.given:
            return f"--debian-mirror {self.given} names no moment"
        return f"no snapshot of Debian's archive can be reached ({self.trouble})"

    def gave_up(self, error: ArchiveError) -> bool:
        """True if the build may go on without the snapshot. Later builds of this command skip it."""
        if self.given or self.is_strict:
            return False
        self.trouble = f"{self.service}: {error.message}"
        return True

    def hint(self, lock: debian.Lock, tried: Mirror | None) -> str:
        """Returns the hint for packages that differ from the lock. It never names the archive that was just tried."""
        dated = Mirror(root=self.service, timestamp=lock.snapshot)
        if tried and tried.timestamp:
            return installed.TODAY
        return f"--debian-mirror {dated} takes the packages of the lock; {installed.TODAY}"


def hold(root: Path, job: Job, engine: docker.Engine, archives: Archives, say: Say) -> Job:
    """Returns the job with packages of the lock, or of a temporary one. Raises BuildError naming each that moved.

    Nothing is compiled yet. Files are left in `mirror.workplace`.
    """
    lock = installed.refuse_unlocked(root, job, engine)
    archive = archives.choose(job.cell.base, lock.snapshot)
    if archive and archive.timestamp:
        try:
            return installed.hold_to_lock(root, through(root, job, archive), engine, hint=archives.hint(lock, archive))
        except ArchiveError as error:
            if not archives.gave_up(error):
                raise
            archive = None
    return _hold_newest(root, through(root, job, archive), lock, engine, archives, archive, say)


def _hold_newest(
    root: Path,
    job: Job,
    lock: debian.Lock,
    engine: docker.Engine,
    archives: Archives,
    archive: Mirror | None,
    say: Say,
) -> Job:
    """Prefers cached layers: packages of the lock in them are as good as a snapshot, and nothing is compiled again."""
    hint = archives.hint(lock, archive)
    if archives.is_strict:
        return installed.hold_to_lock(root, job, engine, hint=hint)
    if not job.no_cache and not installed.differing(root, job):
        _reassure(archives, say)
        return job
    fresh = resolve(root, job, lock, archive)
    moved = debian.moved(_part_of(lock, root, job.cell), fresh)
    if not moved:
        _reassure(archives, say)
        return installed.hold_to_lock(root, job, engine, hint=hint)
    held = installed.hold_to_lock(
        root, build.relock(root, job, fresh), engine, hint="the archive moved between two questions: run it again"
    )
    save(root, held)
    say(_confession(archives, moved))
    return held


def settle(root: Path, job: Job, engine: docker.Engine, archives: Archives, say: Say) -> Job:
    """Returns the job for builds without cached layers: the archive's present packages, compared with the lock.

    Raises BuildError if a snapshot differs from the lock, or if only the lock will do.
    """
    lock = installed.refuse_unlocked(root, job, engine)
    archive = archives.choose(job.cell.base, lock.snapshot)
    try:
        fresh = resolve(root, job, lock, archive)
    except ArchiveError as error:
        if archive is None or not archives.gave_up(error):
            raise
        archive = None
        fresh = resolve(root, job, lock, archive)
    moved = debian.moved(_part_of(lock, root, job.cell), fresh)
    job = through(root, job, archive)
    if not moved:
        return job
    if archives.is_strict or (archive and archive.timestamp):
        message = (
            f"cell {job.cell.id} would not be built of what {installed.name_of(job)} says: {installed.some(moved)}"
        )
        raise BuildError(message, hint=archives.hint(lock, archive))
    say(_confession(archives, moved))
    return build.relock(root, job, fresh)


def by_way_of(root: Path, job: Job, engine: docker.Engine, archives: Archives) -> Job:
    """Returns the job with the archive that a build of it takes now."""
    lock = installed.refuse_unlocked(root, job, engine)
    return through(root, job, archives.choose(job.cell.base, lock.snapshot))


def through(root: Path, job: Job, archive: Mirror | None) -> Job:
    """Returns the job with an archive in place of the base's sources, and with another index if one is named."""
    return index.through(root, mirror.write(root, job, archive, _sources(root, job)) if archive else job)


def resolve(root: Path, job: Job, lock: debian.Lock, archive: Mirror | None) -> debian.Lock:
    """Returns a lock of an archive's present packages. Raises ArchiveError if it cannot be asked."""
    before = mirror.prologue(mirror.rewritten(archive, _sources(root, job))) if archive else ""
    parts = sorted(build.parts_of(root, job.cell))
    answer = asked.ask(root, job, before + debian.script(parts), is_cached=False)
    image = job.base.override or job.cell.base.image
    return debian.parse_answer(answer.splitlines(), image=image, identity=job.base.identity, platform=lock.platform)


def path_for(build_id: str) -> Path:
    """Returns the path of a temporary lock, which `verify` and the next build read."""
    return build.ARCHIVES / f"{build_id}.debian.json"


def save(root: Path, job: Job) -> None:
    if job.lock:
        (root / path_for(job.build_id)).write_text(debian.dump(job.lock), "utf-8")


def load(root: Path, build_id: str) -> debian.Lock | None:
    """Returns the temporary lock of an image; None if the image was built elsewhere."""
    path = path_for(build_id)
    return debian.load_file(root / path, name=str(path)) if (root / path).is_file() else None


def lock_of(root: Path, cell: Cell, platform: str, labels: Mapping[str, str]) -> debian.Lock | None:
    """Returns the lock that an image was held to, by its labels: that of its base, or a temporary one."""
    if labels.get(REPRODUCIBLE_LABEL) == "no":
        return load(root, labels.get(BUILD_ID_LABEL, ""))
    known = next((each for each in cell.platforms if each == platform), None)
    return debian.load(root, cell.base, known) if known else None


def stood_on(cell: Cell, labels: Mapping[str, str]) -> tuple[str, str | None]:
    """Returns digests of the base and the toolkit image of a build. None means the matrix's toolkit."""
    is_other = build.other_base(labels) is not None
    base = labels.get("org.opencontainers.image.base.digest") if is_other else cell.base.digest
    return base or render.NONE, labels.get(build.TOOLKIT_OVERRIDE_LABEL, "").rpartition(" ")[2] or None


def build_id_of(root: Path, cell: Cell, platform: str, labels: Mapping[str, str]) -> str:
    """Returns the build id that this tree gives an image with the base, toolkit and packages of its labels."""
    base, toolkit = stood_on(cell, labels)
    return build.build_id_of(root, cell, base, toolkit, lock=lock_of(root, cell, platform, labels))


def find_temporary(root: Path, job: Job, engine: docker.Engine, archives: Archives) -> Job | None:
    """Returns the job under the temporary lock of an image that differs in nothing else, if no snapshot answers.

    So the image is not built again each time the archive moves.
    """
    archive = (
        None
        if archives.is_strict
        else archives.choose(job.cell.base, installed.refuse_unlocked(root, job, engine).snapshot)
    )
    if archives.is_strict or (archive and archive.timestamp):
        return None
    for image in engine.images_labelled({"io.appliance.cell": job.cell.id, REPRODUCIBLE_LABEL: "no"}):
        known = image.labels.get(BUILD_ID_LABEL, "")
        lock = load(root, known)
        if lock and (found := build.relock(root, job, lock)).build_id == known:
            return found
    return None


def _sources(root: Path, job: Job) -> str:
    return asked.ask(root, job, debian.PRINT_SOURCES, is_cached=True)


def _part_of(lock: debian.Lock, root: Path, cell: Cell) -> debian.Lock:
    """Returns the part of the lock that the cell installs."""
    wanted = build.parts_of(root, cell)
    return lock.model_copy(update={"parts": {name: part for name, part in lock.parts.items() if name in wanted}})


def _reassure(archives: Archives, say: Say) -> None:
    """Says that another archive still gave the lock's packages. An archive that the user named needs no word."""
    if not archives.given:
        say(f"{archives.reason}; the packages are those of the lock all the same")


def _confession(archives: Archives, moved: list[str]) -> str:
    names = len({line.partition(":")[0] for line in moved})
    return (
        f"{archives.reason}: the newest packages are taken, {names} of them not the lock's; "
        f"the image says {REPRODUCIBLE_LABEL}=no"
    )
