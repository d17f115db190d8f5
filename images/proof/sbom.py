"""Describes a built image as SPDX: Debian packages, wheels, the engine with its source, and its compilers.

Read from the image's own layers wherever they tell. The matrix, the rendered Dockerfile and the locks say what no file
in a layer can: the engine's commit, the hash of its source, nvcc and its targets. The same image gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import Literal

from license_expression import ExpressionError
from packageurl import PackageURL
from packaging.utils import canonicalize_name
from spdx_tools.common.spdx_licensing import spdx_licensing
from spdx_tools.spdx.model.actor import Actor, ActorType
from spdx_tools.spdx.model.checksum import Checksum, ChecksumAlgorithm
from spdx_tools.spdx.model.document import CreationInfo, Document
from spdx_tools.spdx.model.package import ExternalPackageRef, ExternalPackageRefCategory, Package, PackagePurpose
from spdx_tools.spdx.model.relationship import Relationship, RelationshipType
from spdx_tools.spdx.model.spdx_no_assertion import SpdxNoAssertion
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
from spdx_tools.spdx.writer.json.json_writer import write_document_to_stream

from images import docker
from images.build import build, packages
from images.build.build import ARCHIVES, BUILD_ID_LABEL, REPRODUCIBLE_LABEL
from images.errors import BuildError, VerificationError
from images.layers.tree import Entry, Tree, read_tree
from images.matrix.matrix import LOCKS, Cell, Engine, Toolkit
from images.matrix.render import OWN_LICENSE
from images.pins import debian, web_lock

SPDX_VERSION = "SPDX-2.3"
CREATED_LABEL = "org.opencontainers.image.created"
LICENSES_LABEL = "org.opencontainers.image.licenses"
REVISION_LABEL = "org.opencontainers.image.revision"
VERSION_LABEL = "org.opencontainers.image.version"
IMAGE_ID = "SPDXRef-image"
UNLOCKED = (
    "not reproducible: no snapshot of Debian's archive could be reached, so its packages are those that were the "
    "newest when it was built, and not those of the project's lock"
)
DOCUMENT_ID = "SPDXRef-DOCUMENT"

# One file for all packages, or, in images made without dpkg, one for each.
STATUS_PATH = "var/lib/dpkg/status"
STATUS = re.compile(r"^var/lib/dpkg/status(?:\.d/(?!.*\.md5sums$).+)?$")
METADATA = re.compile(r"^(opt/[^/]+/lib/[^/]+\.dist-info/)METADATA$")  # not what a wheel carries inside itself
FILE_LIST = re.compile(r"^var/lib/dpkg/info/([^/:]+)(?::[a-z0-9-]+)?\.md5sums$")  # of its files, with their MD5
COPYRIGHT = re.compile(r"^usr/share/doc/([^/]+)/copyright$")
OS_RELEASE = "usr/lib/os-release"
SOURCE_FIELD = re.compile(r"^([a-z0-9][a-z0-9+.-]+)(?: \((\S+)\))?$")  # of dpkg: the version where it is another
OWN_CODE = "opt/appliance/lib/appliance/"
KEPT = re.compile("|".join((STATUS.pattern, METADATA.pattern, COPYRIGHT.pattern, f"^{re.escape(OS_RELEASE)}$")))

LICENSE_LINE = re.compile(r"^License:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
CUDA_TARGETS = re.compile(r"-DCMAKE_CUDA_ARCHITECTURES='([^']+)'")
REQUIREMENT = re.compile(r"^[a-z0-9][a-z0-9._-]*==\S+(?: \\\n +--hash=sha256:[0-9a-f]{64})+", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s\\;]+)", re.MULTILINE)
NVCC = "nvidia-cuda-nvcc"
OTHER_NVCC = re.compile(r"\bnvcc (\d[\d.]*\d)")  # in what a toolkit's image says of itself
DEBIAN_TOOLKIT = "nvidia-cuda-toolkit"
# Libraries leave their wheel on the way into the image, and with it the folder that would name them.
WHEEL_OF_LIBRARY = {
    "libcublas": "nvidia-cublas",
    "libcublasLt": "nvidia-cublas",
    "libcudart": "nvidia-cuda-runtime",
    "libnccl": "nvidia-nccl-cu13",
    "libnvrtc": "nvidia-cuda-nvrtc",
    "libnvrtc-builtins": "nvidia-cuda-nvrtc",
}

Kind = Literal["deb", "pypi", "npm", "cuda", "engine", "appliance", "source", "compiler"]
PURPOSES: dict[Kind, PackagePurpose] = {
    "deb": PackagePurpose.LIBRARY,
    "pypi": PackagePurpose.LIBRARY,
    "npm": PackagePurpose.LIBRARY,
    "cuda": PackagePurpose.LIBRARY,
    "engine": PackagePurpose.APPLICATION,
    "appliance": PackagePurpose.APPLICATION,
    "source": PackagePurpose.SOURCE,
    "compiler": PackagePurpose.APPLICATION,
}
# How each stands to what it belongs to: parts are in the image, the other two made the engine.
RELATIONS: dict[Kind, RelationshipType] = {
    "deb": RelationshipType.CONTAINED_BY,
    "pypi": RelationshipType.CONTAINED_BY,
    "npm": RelationshipType.CONTAINED_BY,
    "cuda": RelationshipType.CONTAINED_BY,
    "engine": RelationshipType.CONTAINED_BY,
    "appliance": RelationshipType.CONTAINED_BY,
    "source": RelationshipType.GENERATES,
    "compiler": RelationshipType.BUILD_TOOL_OF,
}


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component of the image, or of what made it. `license` is an SPDX expression, None if unknown."""

    kind: Kind
    name: str
    version: str | None
    purl: str
    license: str | None = None
    said: str | None = None  # licenses in the package's own words
    sha256: str | None = None
    comment: str | None = None

    @property
    def spdx_id(self) -> str:
        # Wheels with their version: an engine from wheels has its own copies beside the appliance's.
        version = f"-{self.version}" if self.kind == "pypi" else ""
        return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", f"{self.kind}-{self.name}{version}")


@dataclass(frozen=True, kw_only=True)
class Hashes:
    """SHA-256 of the files that packages were installed from, by the locks of the build."""

    debs: Mapping[tuple[str, str], str] = field(default_factory=dict)  # by name and version
    wheels: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by name==version: each file of the release

    @classmethod
    def of(cls, lock: debian.Lock | None, texts: Iterable[str]) -> Hashes:
        """Collects the hashes. A Debian package in several parts of a lock is one file in all of them."""
        parts = lock.parts.values() if lock else ()
        debs = {(name, each.version): each.sha256 for part in parts for name, each in part.items()}
        wheels: dict[str, frozenset[str]] = {}
        for text in texts:
            for requirement in REQUIREMENT.findall(text):
                pin = requirement.partition(" ")[0]
                wheels[pin] = wheels.get(pin, frozenset()) | frozenset(HASH.findall(requirement))
        return cls(debs=debs, wheels=wheels)


def path_for(cell: Cell) -> Path:
    """Returns the path of the document, next to the cell's archive."""
    return ARCHIVES / f"{cell.id}.spdx.json"


def describes(path: Path, digest: str) -> bool:
    """True if the file describes this image."""
    return path.is_file() and f'"checksumValue": "{digest.removeprefix("sha256:")}"' in path.read_text("utf-8")


def write(root: Path, cell: Cell, engine: docker.Engine, *, image: str, out: Path) -> None:
    """Writes the document of the engine's image, whole or not at all. Raises VerificationError without an image."""
    found = engine.image(image)
    if found is None:
        message = f"cell {cell.id} has no image here: {image}"
        raise VerificationError(message, hint=f"python -m images build --only {cell.id}")
    tree = _saved_tree(root, cell, engine, image)
    dockerfile = (root / cell.folder / "Dockerfile").read_text("utf-8")
    locks = {path.stem: path.read_text("utf-8") for path in sorted((root / LOCKS).glob("*.txt"))}
    lock = packages.lock_of(root, cell, found.platform, found.labels)
    hashes = Hashes.of(lock, locks.values())
    other = build.other_toolkit(cell, found.labels)
    components = [
        *contents(tree, hashes),
        *page_libraries(tree, web_lock.libraries(root)),
        appliance(tree, found),
        *cuda_libraries(tree, cell, locks, hashes, other=other),
        *made_from(cell, dockerfile, locks, tree, hashes, other=other),
    ]
    save(out, dump(document(cell, found, components)))


def save(out: Path, text: str) -> None:
    """Saves whole or not at all. Raises BuildError without room or permission."""
    part = out.with_name(f"{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, "utf-8")
        part.replace(out)
    except OSError as error:
        message = f"the bill of materials cannot be written: {out}: {error.strerror}"
        raise BuildError(message, hint="python -m images prune gives space back") from error
    finally:
        part.unlink(missing_ok=True)


def contents(tree: Tree, hashes: Hashes | None = None) -> Iterator[Component]:
    """Yields Debian packages and wheels by the files of the image. Raises VerificationError without any package."""
    known = hashes or Hashes()
    distribution = _distribution(tree)
    said = {match[1]: parse_copyright(_text(entry)) for match, entry in _matching(tree, COPYRIGHT)}
    listed = {match[1]: entry.sha256 for match, entry in _matching(tree, FILE_LIST)}
    debs = [
        each
        for _, entry in _matching(tree, STATUS)
        for each in packages_of(_text(entry), distribution, said, known.debs, listed)
    ]
    if not debs:
        message = "the image holds no list of Debian packages: var/lib/dpkg/status"
        raise VerificationError(message, hint="a runtime stage must leave it there")
    yield from debs
    wheels = [
        _hashed(parse_metadata(_text(entry)), tree.files.get(f"{match[1]}RECORD"), known.wheels)
        for match, entry in _matching(tree, METADATA)
    ]
    yield from {wheel.purl: wheel for wheel in wheels}.values()  # the same version twice is one package


def _hashed(wheel: Component, record: Entry | None, known: Mapping[str, frozenset[str]]) -> Component:
    """Adds the hash of the wheel. A lock has all files of a release, and no file of the image says which pip took.

    The wheel's own list of files and hashes tells what it unpacked.
    """
    locked = sorted(known.get(f"{wheel.name}=={wheel.version}", ()))
    if len(locked) == 1:
        return replace(wheel, sha256=locked[0])
    admitted = f"one of the {len(locked)} files that the lock admits" if locked else "in no lock of this tree"
    listed = f"; SHA-256 of its RECORD: {record.sha256}" if record and record.sha256 else ""
    return replace(wheel, comment=f"{admitted}{listed}")


def page_libraries(tree: Tree, locked: Iterable[web_lock.WebLibrary]) -> Iterator[Component]:
    """Yields the libraries of the pages whose files are in the image."""
    for library in locked:
        files = [file for file in library.files if f"{web_lock.FOLDER}{file.name}" in tree.files]
        if files:
            listed = ", ".join(
                f"{file.name} SHA-256 {tree.files[web_lock.FOLDER + file.name].sha256}" for file in files
            )
            scope, _, name = library.name.rpartition("/")
            yield Component(
                kind="npm",
                name=library.name,
                version=library.version,
                purl=PackageURL("npm", scope or None, name, library.version).to_string(),
                license=library.license,
                comment=f"from {library.url}, {library.integrity}: {listed}",
            )


def appliance(tree: Tree, image: docker.Image) -> Component:
    """Returns this project's own code in the image, identified by its files."""
    own = [each for path, each in sorted(tree.files.items()) if path.startswith(OWN_CODE) and path.endswith(".py")]
    lines = "".join(f"{each.sha256}  {each.path.removeprefix(OWN_CODE)}\n" for each in own)
    version = image.labels.get(VERSION_LABEL, "0")
    return Component(
        kind="appliance",
        name="appliance",
        version=version,
        purl=_purl("generic", "appliance", version),
        license=OWN_LICENSE,
        comment=f"git commit {image.labels.get(REVISION_LABEL, 'not known')}; {len(own)} files, SHA-256 of their list "
        f"as sha256sum writes it: {hashlib.sha256(lines.encode()).hexdigest()}",
    )


def packages_of(
    text: str,
    distribution: Distribution,
    said: Mapping[str, str],
    hashes: Mapping[tuple[str, str], str],
    listed: Mapping[str, str],
) -> Iterator[Component]:
    """Yields the installed packages of a dpkg status file, with release and source package for scanners.

    `said`: licenses by copyright file. `listed`: SHA-256 of dpkg's list of files, all that a base tells of a package
    that no lock has.
    """
    for package in debian.parse_status(text):
        sha256 = hashes.get((package.name, package.version))
        qualifiers = {"arch": package.architecture, "distro": distribution.release, "upstream": _upstream(package)}
        told = {name: value for name, value in qualifiers.items() if value}
        source = f"source package {package.source}" if package.source else ""
        own = f"; SHA-256 of dpkg's list of its files: {listed[package.name]}" if package.name in listed else ""
        origin = "" if sha256 else f"in no Debian lock: of the base image{own}"
        yield Component(
            kind="deb",
            name=package.name,
            version=package.version,
            purl=PackageURL("deb", distribution.name, package.name, package.version, told).to_string(),
            said=said.get(package.name),
            sha256=sha256,
            comment="; ".join(filter(None, (source, origin))) or None,
        )


def _upstream(package: debian.Installed) -> str | None:
    """Returns the source package in syft's form, with its version if it differs from the binary's."""
    found = SOURCE_FIELD.match(package.source or "")
    return None if found is None else f"{found[1]}@{found[2]}" if found[2] else found[1]


def parse_copyright(text: str) -> str:
    """Returns the short names of a machine-readable copyright file, which are not SPDX's; empty for another kind."""
    if not text.startswith("Format:"):
        return ""
    return ", ".join(sorted(set(LICENSE_LINE.findall(text))))


def parse_metadata(text: str) -> Component:
    """Returns a wheel by its METADATA. Raises VerificationError if that names no package."""
    fields = HeaderParser().parsestr(text)
    name, version = fields.get("Name"), fields.get("Version")
    if not name or not version:
        message = f"a wheel in the image does not say what it is: {text[:80]!r}"
        raise VerificationError(message)
    words = fields.get("License-Expression") or fields.get("License") or ""
    classifiers = [line.removeprefix("License :: ") for line in fields.get_all("Classifier", []) if "License" in line]
    said = "; ".join(filter(None, (words.partition("\n")[0], *classifiers)))
    normal = canonicalize_name(name)
    return Component(
        kind="pypi",
        name=normal,
        version=version,
        purl=_purl("pypi", normal, version),
        license=_expression(words),
        said=said or None,
    )


def cuda_libraries(
    tree: Tree, cell: Cell, locks: Mapping[str, str], hashes: Hashes | None = None, *, other: str | None = None
) -> list[Component]:
    """Returns NVIDIA's libraries below /opt, by their wheels, or by their own names and the toolkit's.

    `other`: the replacement of the cell's toolkit.
    """
    known = hashes or Hashes()
    # Several names of one library are links to the longest of them.
    files = {
        PurePosixPath(path).name.partition(".so")[0]: each
        for path, each in sorted(tree.files.items())
        if _is_ours(each)
    }
    found = (
        sorted(set(files) & set(WHEEL_OF_LIBRARY)) if cell.engine.is_compiled else []
    )  # a wheel's folder names itself
    toolkit = cell.toolkit
    if toolkit is None or other:
        why = other or "no toolkit of this cell brings it"
        return [_library(name, None, why, files[name]) for name in found]
    pins = pins_of(locks.get(toolkit.lock, "")) if toolkit.lock else {}
    wheels = {WHEEL_OF_LIBRARY[name]: files[name] for name in found if WHEEL_OF_LIBRARY[name] in pins}
    rest = [name for name in found if WHEEL_OF_LIBRARY[name] not in pins]
    return [
        *(_wheel_of(name, pins[name], wheels[name], known) for name in sorted(wheels)),
        *(_library(name, toolkit.release, toolkit.source, files[name]) for name in rest),
    ]


def _is_ours(entry: Entry) -> bool:
    return entry.path.startswith("opt/") and entry.kind == "file"


def _wheel_of(name: str, version: str, library: Entry, known: Hashes) -> Component:
    """Returns a wheel that left libraries and no metadata."""
    wheel = Component(kind="pypi", name=name, version=version, purl=_purl("pypi", name, version))
    locked = sorted(known.wheels.get(f"{name}=={version}", ()))
    if len(locked) == 1:
        return replace(wheel, sha256=locked[0])
    return replace(wheel, comment=_digest_of(library))


def _digest_of(file: Entry) -> str:
    return f"SHA-256 of /{file.path}: {file.sha256}"


def made_from(
    cell: Cell,
    dockerfile: str,
    locks: Mapping[str, str],
    tree: Tree | None = None,
    hashes: Hashes | None = None,
    *,
    other: str | None = None,
) -> Iterator[Component]:
    """Yields the engine, its source file, and for a CUDA cell its compiler with options. `other`: another toolkit."""
    engine = cell.engine
    number = f" b{engine.build}" if engine.build is not None else ""
    patched = f"patched by {', '.join(engine.patches)}" if engine.patches else ""
    binary = tree.files.get(engine.files.binary.lstrip("/")) if tree else None
    yield Component(
        kind="engine",
        name=engine.title,
        version=f"{engine.version}{number}",
        purl=f"pkg:github/{engine.files.repository}@{engine.commit or engine.version}",
        license=_expression(engine.license),
        said=engine.license,
        comment="; ".join(filter(None, (_commit_of(engine), patched, _digest_of(binary) if binary else ""))),
    )
    yield source_of(cell)
    if cell.toolkit:
        found = compiler(cell.toolkit, dockerfile, locks, hashes)
        yield _other_compiler(found, other) if other else found


def source_of(cell: Cell) -> Component:
    """Returns the engine's source file or wheels; the image's platform tells which wheel it was."""
    source, commit = cell.engine.source, _commit_of(cell.engine)
    wheels = ", ".join(f"{platform} {sha256}" for platform, sha256 in source.wheels.items())
    told = f"installed as a wheel, SHA-256 by platform: {wheels}"
    return Component(
        kind="source",
        name=source.distribution,
        version=source.release,
        purl=_purl("pypi", source.distribution, source.release),
        sha256=source.sha256,
        comment=f"{told}; {commit}" if wheels else f"the engine's tree travels in this source distribution: {commit}",
    )


def _commit_of(engine: Engine) -> str:
    """Returns the engine's commit in words; a third party's wheel may name none."""
    return f"git commit {engine.commit}" if engine.commit else f"no commit is named; built by {engine.publisher}"


def compiler(toolkit: Toolkit, dockerfile: str, locks: Mapping[str, str], hashes: Hashes | None = None) -> Component:
    """Returns nvcc with version and options. Raises VerificationError if the Dockerfile gives it none."""
    targets = CUDA_TARGETS.search(dockerfile)
    if targets is None:
        message = f"the Dockerfile of a CUDA {toolkit.cuda} cell names no target: CMAKE_CUDA_ARCHITECTURES"
        raise VerificationError(message)
    pins = pins_of(locks.get(toolkit.lock, "")) if toolkit.lock else {}
    version = pins.get(NVCC, toolkit.release)
    told = " ".join(gencode(target) for target in targets[1].split(";"))
    known = hashes or Hashes()
    deb = known.debs.get((DEBIAN_TOOLKIT, toolkit.release))
    admitted = sorted(known.wheels.get(f"{NVCC}=={version}", ())) if NVCC in pins else [deb] if deb else []
    files = f"; SHA-256 of the wheels that the lock admits: {', '.join(admitted)}" if len(admitted) > 1 else ""
    return Component(
        kind="compiler",
        name="nvcc",
        version=version,
        purl=_purl("pypi", NVCC, version) if NVCC in pins else _purl("generic", "nvcc", version),
        sha256=admitted[0] if len(admitted) == 1 else None,
        comment=f"{told}; {toolkit.source}{files}",
    )


def _other_compiler(pinned: Component, other: str) -> Component:
    """Returns nvcc of a replaced toolkit, with the version that the image's name gives, if any."""
    version = OTHER_NVCC.search(other)
    return replace(
        pinned,
        version=version[1] if version else None,
        purl=_purl("generic", "nvcc", version[1] if version else None),
        sha256=None,
        comment=f"{(pinned.comment or '').partition(';')[0]}; {other}",
    )


def pins_of(lock: str) -> dict[str, str]:
    """Returns the versions of a hash-locked requirements file, by package."""
    return dict(PIN.findall(lock))


def gencode(target: str) -> str:
    """Returns nvcc's option for an entry of CMAKE_CUDA_ARCHITECTURES: `90a-real` is code for 90a without PTX."""
    chip, _, form = target.partition("-")
    codes = {"real": f"sm_{chip}", "virtual": f"compute_{chip}", "": f"[compute_{chip},sm_{chip}]"}
    if form not in codes:
        message = f"not an entry of CMAKE_CUDA_ARCHITECTURES: {target}"
        raise VerificationError(message, hint="entries read 90, 90-real or 90-virtual")
    return f"-gencode arch=compute_{chip},code={codes[form]}"


def document(cell: Cell, image: docker.Image, components: Iterable[Component]) -> Document:
    """Returns the document, named by the image's digest and dated by its label: one image, one document."""
    parts = sorted(components, key=lambda part: (part.kind, part.name))
    created = image.labels.get(CREATED_LABEL, "")
    try:
        moment = datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError as error:
        message = f"the image's label {CREATED_LABEL} is no date: {created!r}"
        raise VerificationError(message, hint=f"python -m images build --only {cell.id} --force") from error
    version = image.labels.get(VERSION_LABEL, "0")
    return Document(
        creation_info=CreationInfo(
            spdx_version=SPDX_VERSION,
            spdx_id=DOCUMENT_ID,
            name=cell.tag,
            document_namespace=f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, f'{cell.id} {image.id}')}",
            creators=[Actor(ActorType.TOOL, f"appliance-images-{version}")],
            created=moment,
        ),
        packages=[_image_package(cell, image), *map(_package, parts)],
        relationships=[
            Relationship(DOCUMENT_ID, RelationshipType.DESCRIBES, IMAGE_ID),
            *(Relationship(part.spdx_id, RELATIONS[part.kind], _whole_of(part, parts)) for part in parts),
        ],
    )


def dump(made: Document) -> str:
    """Returns the document as JSON. Raises VerificationError with the library's own words if it is no valid SPDX."""
    complaints = validate_full_spdx_document(made)
    if complaints:
        first = complaints[0]
        message = f"the document is not valid SPDX: {len(complaints)} complaints, {first.validation_message}"
        raise VerificationError(message, hint=f"it is about {first.context.spdx_id or first.context.parent_id}")
    stream = io.StringIO()
    write_document_to_stream(made, stream, validate=False)
    return stream.getvalue() + "\n"


def _saved_tree(root: Path, cell: Cell, engine: docker.Engine, image: str) -> Tree:
    archive = root / ARCHIVES / f"{cell.id}.sbom.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        engine.save(image, archive)
        return read_tree(archive, kept=KEPT)
    finally:
        archive.unlink(missing_ok=True)


def _matching(tree: Tree, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], Entry]]:
    for path, entry in sorted(tree.files.items()):
        match = pattern.match(path)
        if match and entry.kind == "file":
            yield match, entry


def _text(entry: Entry) -> str:
    return entry.content.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class Distribution:
    name: str
    release: str | None  # debian-12


def _distribution(tree: Tree) -> Distribution:
    """Returns `debian` unless the image names another one."""
    entry = tree.files.get(OS_RELEASE)
    fields = dict(re.findall(r"^(ID|VERSION_ID)=\"?([A-Za-z0-9._-]+)", _text(entry), re.MULTILINE)) if entry else {}
    name = fields.get("ID", "debian")
    return Distribution(name=name, release=f"{name}-{fields['VERSION_ID']}" if "VERSION_ID" in fields else None)


def _library(name: str, version: str | None, comment: str, file: Entry) -> Component:
    purl = _purl("generic", name, version)
    return Component(kind="cuda", name=name, version=version, purl=purl, sha256=file.sha256 or None, comment=comment)


def _purl(kind: str, name: str, version: str | None) -> str:
    return PackageURL(kind, name=name, version=version).to_string()


def _expression(words: str) -> str | None:
    """Returns the license expression. None unless SPDX knows every license in it: `BSD` could be any of several."""
    try:
        known = spdx_licensing.parse(words, validate=True, strict=True)
    except ExpressionError:
        return None
    return words if known is not None else None


def _whole_of(part: Component, parts: Iterable[Component]) -> str:
    if part.kind not in ("source", "compiler"):
        return IMAGE_ID
    return next(each.spdx_id for each in parts if each.kind == "engine")


def _package(part: Component) -> Package:
    return Package(
        spdx_id=part.spdx_id,
        name=part.name,
        version=part.version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        checksums=[Checksum(ChecksumAlgorithm.SHA256, part.sha256)] if part.sha256 else [],
        license_declared=spdx_licensing.parse(part.license) if part.license else SpdxNoAssertion(),
        license_comment=f"it says: {part.said}" if part.said and not part.license else None,
        comment=part.comment,
        external_references=[ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", part.purl)],
        primary_package_purpose=PURPOSES[part.kind],
    )


def _image_package(cell: Cell, image: docker.Image) -> Package:
    licenses = _expression(image.labels.get(LICENSES_LABEL, ""))
    return Package(
        spdx_id=IMAGE_ID,
        name=cell.tag,
        version=image.labels.get(BUILD_ID_LABEL),
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        checksums=[Checksum(ChecksumAlgorithm.SHA256, image.id.removeprefix("sha256:"))],
        license_declared=spdx_licensing.parse(licenses) if licenses else SpdxNoAssertion(),
        license_comment="of this project and its engine; each package below has its own",
        comment=UNLOCKED if image.labels.get(REPRODUCIBLE_LABEL) == "no" else None,
        primary_package_purpose=PackagePurpose.CONTAINER,
    )
