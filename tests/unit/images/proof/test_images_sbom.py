"""What a tree of files says of itself, and that the library holds the result for valid SPDX."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from debian.debian_support import Version
from hypothesis import given
from hypothesis import strategies as st
from packageurl import PackageURL
from spdx_tools.spdx.model.package import Package
from spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from images import docker
from images.errors import BuildError, VerificationError
from images.layers.tree import Entry, Tree
from images.matrix import matrix
from images.matrix.matrix import Cell, Toolkit
from images.pins import debian
from images.proof import sbom

DIGEST = "sha256:" + "d" * 64
STATUS = """Package: libgomp1
Status: install ok installed
Architecture: amd64
Source: gcc-12
Version: 12.2.0-14+deb12u1

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: tini
Status: install ok installed
Architecture: amd64
Version: 1:0.19.0-1
Description: a small init
 .
 with a paragraph
"""
COPYRIGHT = "Format: https://example.org/copyright-format/1.0/\n\nFiles: *\nLicense: GPL-3+\n\nLicense: Expat\n text\n"
METADATA = (
    "Metadata-Version: 2.4\nName: Typing_Extensions\nVersion: 4.16.0\nLicense-Expression: PSF-2.0\n\nLicense: x\n"
)
VAGUE = "Metadata-Version: 2.1\nName: nvidia-ml-py\nVersion: 13.0\nLicense: BSD\nClassifier: License :: OSI Approved\n"
WHEELS = Toolkit(cuda="13.0", form="wheels", release="13.0.3", lock="cuda-13.0")
LOCKS = {
    "cuda-13.0": "nvidia-cuda-nvcc==13.0.88 \\\n    --hash=sha256:0\nnvidia-cuda-runtime==13.0.96 \\\n    --hash=x\n"
}
DOCKERFILE = "RUN cmake -DCMAKE_CUDA_ARCHITECTURES='90a-real' \\\n"


@pytest.fixture
def tree() -> Tree:
    return _tree(
        {
            "var/lib/dpkg/status": STATUS,
            "usr/share/doc/libgomp1/copyright": COPYRIGHT,
            "usr/share/doc/tini/copyright": "Written by hand. License: MIT\n",
            "usr/lib/os-release": 'NAME="Debian"\nID=debian\nVERSION_ID="12"\n',
            "opt/appliance/lib/typing_extensions-4.16.0.dist-info/METADATA": METADATA,
            "opt/appliance/lib/nvidia_ml_py-13.0.dist-info/METADATA": VAGUE,
        }
    )


@pytest.fixture
def image() -> docker.Image:
    labels = {
        "io.appliance.build-id": "b" * 32,
        "org.opencontainers.image.created": "2026-11-21T05:46:18Z",
        "org.opencontainers.image.licenses": "Apache-2.0 AND MIT",
        "org.opencontainers.image.version": "0.1.0",
    }
    return _image(labels)


def test_packages_wheels_engine_and_source_are_named(tree: Tree, image: docker.Image, cell: Cell) -> None:
    packages = _packages(tree, image, cell)
    assert sorted(packages) == [
        "appliance:llama-cpu", "libgomp1", "llama-cpp-python", "llama.cpp", "nvidia-ml-py", "tini", "typing-extensions",
    ]  # fmt: skip
    assert _purl(packages["tini"]) == "pkg:deb/debian/tini@1:0.19.0-1?arch=amd64&distro=debian-12"
    assert _purl(packages["libgomp1"]).endswith("?arch=amd64&distro=debian-12&upstream=gcc-12")
    assert packages["libgomp1"].comment == "source package gcc-12; in no Debian lock: of the base image"
    assert _purl(packages["llama.cpp"]) == f"pkg:github/ggml-org/llama.cpp@{cell.engine.commit}"
    assert packages["libgomp1"].license_comment == "it says: Expat, GPL-3+"
    assert packages["tini"].license_comment is None
    assert str(packages["typing-extensions"].license_declared) == "PSF-2.0"
    assert packages["nvidia-ml-py"].license_comment == "it says: BSD; OSI Approved"
    assert cell.engine.commit in str(packages["llama.cpp"].comment)
    assert packages["llama-cpp-python"].checksums[0].value == cell.engine.source.sha256
    assert packages["appliance:llama-cpu"].checksums[0].value == "d" * 64


def test_every_package_has_the_hash_that_its_lock_has(tree: Tree) -> None:
    """A Debian package has the hash of its file. A wheel has it too if its release has one file; otherwise the comment
    has the hash of its RECORD."""
    tree.files["opt/appliance/lib/typing_extensions-4.16.0.dist-info/RECORD"] = _tree({"x": ""}).files["x"]
    lock = debian.Lock.model_validate(
        {
            "image": "debian:bookworm-slim", "base": "sha256:0", "platform": "linux/amd64", "suites": ["bookworm"],
            "archive_date": "2026-11-20T02:11:10Z", "snapshot": "20261120T061110Z",
            "parts": {"tini": {"tini": {"version": "1:0.19.0-1", "architecture": "amd64", "sha256": "7" * 64}}},
        }
    )  # fmt: skip
    text = (
        f"nvidia-ml-py==13.0 \\\n    --hash=sha256:{'1' * 64}\n    # via x\n"
        f"typing-extensions==4.16.0 \\\n    --hash=sha256:{'2' * 64} \\\n    --hash=sha256:{'3' * 64}\n"
    )
    found = {each.name: each for each in sbom.contents(tree, sbom.Hashes.of(lock, [text]))}
    assert (found["tini"].sha256, found["tini"].comment) == ("7" * 64, None)
    assert found["nvidia-ml-py"].sha256 == "1" * 64
    assert found["typing-extensions"].sha256 is None
    assert found["typing-extensions"].comment == (
        f"one of the 2 files that the lock admits; SHA-256 of its RECORD: {'f' * 64}"
    )
    assert next(sbom.contents(tree)).comment == "source package gcc-12; in no Debian lock: of the base image"


HEX = re.compile(r"\b[0-9a-f]{64}\b")


@pytest.mark.parametrize(
    "name", ["llama-cpu", "llama-cu124-sm86", "llama-cu128-sm90", "llama-cu130-sm90", "vllm-cu130"]
)
def test_every_package_has_a_hash(tree: Tree, image: docker.Image, project: Path, name: str) -> None:
    """The hash is that of the package's file if a lock or the image has the file. Otherwise the comment has a hash of
    what the image has of the package."""
    cell = matrix.select(matrix.load(project).cells, name)[0]
    paths = [
        *(f"var/lib/dpkg/info/{each}.md5sums" for each in ("libgomp1:amd64", "tini")),
        cell.engine.files.binary[1:],
    ]
    paths += ["opt/llama/libcudart.so.13", "opt/llama/libcublas.so.13", "opt/llama/libnvrtc.so.13"]
    paths += [f"{path[: -len('METADATA')]}RECORD" for path in tree.files if path.endswith("METADATA")]
    tree.files |= _tree(dict.fromkeys(paths, "")).files
    locks = {path.stem: path.read_text("utf-8") for path in (project / "images/locks").glob("*.txt")}
    hashes = sbom.Hashes.of(debian.load(project, cell.base, "linux/amd64"), locks.values())
    dockerfile = (project / cell.folder / "Dockerfile").read_text("utf-8")
    parts = [
        *sbom.contents(tree, hashes),
        sbom.appliance(tree, image),
        *sbom.cuda_libraries(tree, cell, locks, hashes),
        *sbom.made_from(cell, f"{dockerfile}\n{DOCKERFILE}", locks, tree, hashes),
    ]
    told = {each.name: HEX.findall(f"{each.sha256} {each.comment} ") for each in parts}
    assert len(told) >= 7
    assert [name for name, found in told.items() if not found] == []


def test_the_committed_locks_have_a_hash_for_what_they_install(project: Path, cell: Cell) -> None:
    lock = debian.load(project, cell.base, "linux/amd64")
    hashes = sbom.Hashes.of(lock, [(project / "images/locks/appliance.txt").read_text("utf-8")])
    assert lock
    assert {(name, each.version) for part in lock.parts.values() for name, each in part.items()} == set(hashes.debs)
    assert {pin.partition("==")[0] for pin in hashes.wheels} >= {"fastapi", "pydantic", "huggingface-hub", "msgspec"}
    assert all(hashes.wheels.values())


def test_the_appliance_itself_is_named_by_commit_and_files(image: docker.Image) -> None:
    part = sbom.appliance(_tree({"opt/appliance/lib/appliance/x.py": "", "opt/appliance/lib/other/y.py": ""}), image)
    assert (part.purl, part.version, part.license) == ("pkg:generic/appliance@0.1.0", "0.1.0", "Apache-2.0")
    listed = hashlib.sha256(f"{'f' * 64}  x.py\n".encode()).hexdigest()
    assert part.comment == (f"git commit not known; 1 files, SHA-256 of their list as sha256sum writes it: {listed}")
    dated = _image({**image.labels, "org.opencontainers.image.revision": "a" * 40})
    assert str(sbom.appliance(_tree({}), dated).comment).startswith(f"git commit {'a' * 40}; 0 files")


EXPAT = """Package: libexpat1
Status: install ok installed
Architecture: amd64
Source: expat
Version: {version}
"""
# As a scanner of Debian's security tracker has it: release, source package -> the version that has the fix.
ADVISORIES = {("debian-12", "expat"): "2.5.0-1+deb12u5", ("debian-13", "expat"): "2.7.1-2"}


@pytest.mark.parametrize(
    ("version", "is_found"), [("2.5.0-1+deb12u2", True), ("2.5.0-1+deb12u5", False), ("2.5.0-1+deb12u10", False)]
)
def test_a_scanner_finds_an_old_expat_by_release_and_source_package(tree: Tree, version: str, is_found: bool) -> None:
    text = f"{STATUS}\n{EXPAT.format(version=version)}"
    planted = _tree({**{path: each.content.decode() for path, each in tree.files.items()}, sbom.STATUS_PATH: text})
    found = {_vulnerable(each.purl) for each in sbom.contents(planted)} - {None}
    assert found == ({"libexpat1"} if is_found else set())


def test_without_release_or_source_a_scanner_finds_nothing() -> None:
    old = "pkg:deb/debian/libexpat1@2.5.0-1%2Bdeb12u2?arch=amd64"
    assert _vulnerable(old) is None
    assert _vulnerable(f"{old}&distro=debian-12") is None
    assert _vulnerable(f"{old}&distro=debian-12&upstream=expat") == "libexpat1"


@pytest.mark.parametrize(
    ("field", "upstream"),
    [("Source: bash (5.2.15-2)\n", "&upstream=bash%405.2.15-2"), ("Source: gcc-12\n", "&upstream=gcc-12"), ("", "")],
)
def test_a_source_package_of_another_version_is_told_as_syft_does(field: str, upstream: str) -> None:
    text = f"Package: x\nStatus: install ok installed\nArchitecture: amd64\n{field}Version: 1\n"
    found = next(sbom.contents(_tree({sbom.STATUS_PATH: text, sbom.OS_RELEASE: "ID=debian\nVERSION_ID=12\n"})))
    assert found.purl == f"pkg:deb/debian/x@1?arch=amd64&distro=debian-12{upstream}"


def _vulnerable(purl: str) -> str | None:
    """Return the package that grype would report, by its rule for Debian (grype/matcher/dpkg): release and source
    package, else the package's own name. None if none is vulnerable."""
    package = PackageURL.from_string(purl)
    qualifiers = dict(package.qualifiers or {})
    upstream, _, upstream_version = qualifiers.get("upstream", package.name).partition("@")
    fixed = ADVISORIES.get((qualifiers.get("distro", ""), upstream)) if package.type == "deb" else None
    return package.name if fixed and Version(upstream_version or package.version or "") < Version(fixed) else None


def test_an_engine_from_wheels_has_its_own_versions_beside_the_appliances(
    project: Path, tree: Tree, image: docker.Image
) -> None:
    cell = matrix.select(matrix.load(project).cells, "vllm-cu130")[0]
    own = {
        "opt/vllm/lib/typing_extensions-4.16.0.dist-info/METADATA": METADATA,
        "opt/vllm/lib/nvidia_ml_py-14.0.dist-info/METADATA": VAGUE.replace("13.0", "14.0"),
        "opt/vllm/lib/setuptools/_vendor/typing_extensions-1.dist-info/METADATA": METADATA.replace("4.16.0", "1"),
    }
    both = _tree({**{path: entry.content.decode() for path, entry in tree.files.items()}, **own})
    parts = [*sbom.contents(both), *sbom.cuda_libraries(both, cell, {}), *sbom.made_from(cell, "", {})]
    found = json.loads(sbom.dump(sbom.document(cell, image, parts)))["packages"]
    versions = sorted((each["name"], each.get("versionInfo")) for each in found)
    assert [pair for pair in versions if pair[0] in ("nvidia-ml-py", "typing-extensions")] == [
        ("nvidia-ml-py", "13.0"), ("nvidia-ml-py", "14.0"), ("typing-extensions", "4.16.0"),
    ]  # fmt: skip
    source = next(each for each in found if each["name"] == "vllm")
    assert all(sha256 in source["comment"] for sha256 in cell.engine.source.wheels.values())
    assert "nvcc" not in {name for name, _ in versions}


def test_the_same_image_gives_the_same_bytes(tree: Tree, image: docker.Image, cell: Cell) -> None:
    parts = [*sbom.contents(tree), *sbom.made_from(cell, "", {})]
    once = sbom.dump(sbom.document(cell, image, parts))
    assert sbom.dump(sbom.document(cell, image, reversed(parts))) == once
    assert sbom.dump(sbom.document(cell, replace(image, id="sha256:" + "e" * 64), parts)) != once


def test_nvcc_is_named_with_what_it_was_told(tree: Tree, image: docker.Image, cell: Cell) -> None:
    cuda = replace(cell, toolkit=WHEELS)
    packages = _packages(tree, image, cuda, DOCKERFILE, LOCKS)
    assert packages["nvcc"].version == "13.0.88"
    assert str(packages["nvcc"].comment).startswith("-gencode arch=compute_90a,code=sm_90a;")


def test_a_cuda_cell_whose_dockerfile_names_no_target_is_refused(cell: Cell) -> None:
    with pytest.raises(VerificationError, match="names no target"):
        list(sbom.made_from(replace(cell, toolkit=WHEELS), "RUN cmake\n", LOCKS))


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("90-real", "-gencode arch=compute_90,code=sm_90"),
        ("120a-real", "-gencode arch=compute_120a,code=sm_120a"),
        ("80-virtual", "-gencode arch=compute_80,code=compute_80"),
        ("75", "-gencode arch=compute_75,code=[compute_75,sm_75]"),
    ],
)
def test_an_architecture_is_what_cmake_makes_of_it(target: str, told: str) -> None:
    assert sbom.gencode(target) == told


def test_an_architecture_that_cmake_does_not_know_is_refused() -> None:
    with pytest.raises(VerificationError, match="90-reel"):
        sbom.gencode("90-reel")


def test_cuda_libraries_are_traced_to_their_wheel_or_toolkit(cell: Cell) -> None:
    libraries = _tree({"opt/llama/libcudart.so.13": "", "opt/llama/libcublas.so.13": "", "opt/llama/libggml.so": ""})
    found = sbom.cuda_libraries(libraries, replace(cell, toolkit=WHEELS), LOCKS)
    assert [(each.kind, each.name, each.version) for each in found] == [
        ("pypi", "nvidia-cuda-runtime", "13.0.96"),
        ("cuda", "libcublas", "13.0.3"),
    ]
    stray = sbom.cuda_libraries(libraries, cell, LOCKS)
    assert {each.comment for each in stray} == {"no toolkit of this cell brings it"}


def test_a_toolkit_that_stood_for_the_cells_is_named(project: Path) -> None:
    """The pinned toolkit is not named anywhere: it made nothing of this image."""
    cell = matrix.select(matrix.load(project).cells, "llama-cu128-sm90")[0]
    dockerfile = (project / cell.folder / "Dockerfile").read_text("utf-8")
    other = f"Debian's nvcc 12.4.131 and headers sha256:{'3' * 64}"
    libraries = _tree({"opt/llama/libcudart.so.12": "", "opt/llama/libcublas.so.12": ""})
    found = [*sbom.cuda_libraries(libraries, cell, {}, other=other), *sbom.made_from(cell, dockerfile, {}, other=other)]
    nvcc = next(each for each in found if each.name == "nvcc")
    assert (nvcc.version, nvcc.purl) == ("12.4.131", "pkg:generic/nvcc@12.4.131")
    assert nvcc.comment == f"-gencode arch=compute_90,code=sm_90; {other}"
    assert {(each.version, each.comment) for each in found if each.kind == "cuda"} == {(None, other)}
    assert cell.toolkit
    assert cell.toolkit.source not in str(found)
    mine = next(
        each for each in sbom.made_from(cell, dockerfile, {}, other="cuda:mine sha256:3") if each.name == "nvcc"
    )
    assert (mine.version, mine.comment) == (None, "-gencode arch=compute_90,code=sm_90; cuda:mine sha256:3")


def test_an_image_without_a_package_list_is_refused() -> None:
    with pytest.raises(VerificationError, match="no list of Debian packages"):
        list(sbom.contents(_tree({"etc/passwd": ""})))


def test_an_image_without_a_date_is_refused(tree: Tree, cell: Cell) -> None:
    with pytest.raises(VerificationError, match="is no date: ''"):
        sbom.document(cell, _image({}), sbom.contents(tree))


def test_a_wheel_without_a_name_is_refused() -> None:
    with pytest.raises(VerificationError, match="does not say what it is"):
        sbom.parse_metadata("Version: 1\n")


def test_a_document_that_is_not_valid_is_refused_with_the_reason(tree: Tree, image: docker.Image, cell: Cell) -> None:
    made = sbom.document(cell, image, sbom.contents(tree))
    made.creation_info.document_namespace = "not a uri"
    with pytest.raises(VerificationError, match=r"is not valid SPDX: .* must be a valid URI"):
        sbom.dump(made)


def test_two_packages_of_one_name_are_refused(tree: Tree, image: docker.Image, cell: Cell) -> None:
    twice = [*sbom.contents(tree), *sbom.contents(tree)]
    with pytest.raises(VerificationError, match="is not valid SPDX"):
        sbom.dump(sbom.document(cell, image, twice))


@given(st.text())
def test_any_license_field_is_an_expression_or_words(words: str) -> None:
    field = " ".join(words.split())
    part = sbom.parse_metadata(f"Name: x\nVersion: 1\nLicense-Expression: {field}\n")
    assert part.license in (None, field)


def test_a_full_disk_is_exit_60_and_leaves_the_old_document(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    out.write_text("old")
    (tmp_path / "a.json.part").symlink_to("/dev/full")
    with pytest.raises(BuildError, match="No space left on device") as caught:
        sbom.save(out, "new")
    assert caught.value.exit_code == 60
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert out.read_text() == "old"


def test_a_document_knows_its_image(tmp_path: Path, tree: Tree, image: docker.Image, cell: Cell) -> None:
    out = tmp_path / "below" / "a.json"
    assert not sbom.describes(out, DIGEST)
    sbom.save(out, sbom.dump(sbom.document(cell, image, [*sbom.contents(tree), *sbom.made_from(cell, "", {})])))
    assert sbom.describes(out, DIGEST)
    assert not sbom.describes(out, "sha256:" + "e" * 64)


@pytest.mark.parametrize(("labels", "is_said"), [({}, False), ({"io.appliance.reproducible": "no"}, True)])
def test_a_document_says_that_the_debian_lock_was_not_met(
    tree: Tree, image: docker.Image, cell: Cell, labels: dict[str, str], is_said: bool
) -> None:
    comment = _packages(tree, _image({**image.labels, **labels}), cell)[cell.tag].comment
    assert (comment is not None and comment.startswith("not reproducible: ")) == is_said


def _packages(
    tree: Tree, image: docker.Image, cell: Cell, dockerfile: str = "", locks: dict[str, str] | None = None
) -> dict[str, Package]:
    """Return the packages of a document that is written and read back by the library."""
    parts = [*sbom.contents(tree), *sbom.made_from(cell, dockerfile, locks or {})]
    document = JsonLikeDictParser().parse(  # type: ignore[no-untyped-call]
        json.loads(sbom.dump(sbom.document(cell, image, parts)))
    )
    assert validate_full_spdx_document(document) == []
    return {package.name: package for package in document.packages}


def _purl(package: Package) -> str:
    return package.external_references[0].locator


def _image(labels: dict[str, str]) -> docker.Image:
    return docker.Image(id=DIGEST, tags=(), digests=(), config={"Labels": labels})


def _tree(files: dict[str, str]) -> Tree:
    plain: dict[str, Any] = {"kind": "file", "mode": 0o644, "uid": 0, "gid": 0, "layer": 1, "sha256": "f" * 64}
    return Tree(
        files={
            path: Entry(path=path, size_bytes=len(text), content=text.encode(), **plain) for path, text in files.items()
        }
    )
