from __future__ import annotations

import ast
import hashlib
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from images.errors import BuildError, MatrixError
from images.pins import lock

HASH = "sha256:" + "0" * 64
GOOD = f"yarl==1.0 \\\n    --hash={HASH} \\\n    --hash={HASH}\n    # via -r images/locks/appliance.in\n"


def test_every_package_that_the_build_half_imports_is_named(project: Path) -> None:
    """In the extra `images` and in the developer's lock: what comes with another package may leave with it."""
    imported = {
        name.partition(".")[0]
        for file in (project / "images").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        for name in _modules(node)
    }
    foreign = imported - sys.stdlib_module_names - {"appliance", "images"}
    names = {"yaml": "pyyaml", "elftools": "pyelftools", "debian": "python-debian", "packageurl": "packageurl-python"}
    wanted = {names.get(each, each.replace("_", "-")) for each in foreign}
    written = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert wanted <= {*written["optional-dependencies"]["images"]}
    listed = [(project / "images/locks" / f"{name}.in").read_text("utf-8").split() for name in ("dev", "appliance")]
    assert wanted <= {*listed[0], *listed[1]}


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def test_committed_locks_are_hashed_and_name_no_machine(project: Path) -> None:
    paths = list((project / "images/locks").glob("*.txt"))
    assert len(paths) == len(list((project / "images/locks").glob("*.in")))
    for path in paths:
        text = path.read_text("utf-8")
        lock.refuse_foreign(path.stem, text)
        lock.refuse_unhashed(path.stem, text)
        assert "--hash=sha256:" in text


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://example.org/simple",
        "--extra-index-url mirror",
        "--find-links /srv/wheels",
        f"yarl @ https://example.org/yarl.whl --hash={HASH}",
        f"yarl @ file:///srv/yarl.whl --hash={HASH}",
        "    # via -r /home/me/appliance.in",
    ],
)
def test_an_index_or_a_path_of_this_machine_is_refused(line: str) -> None:
    lock.refuse_foreign("appliance", GOOD)
    with pytest.raises(BuildError, match="index address or a machine path") as caught:
        lock.refuse_foreign("appliance", GOOD + line + "\n")
    assert line.strip() in caught.value.message


@pytest.mark.parametrize("line", ["yarl==1.0", f"yarl>=1.0 --hash={HASH}", "-e ."])
def test_a_requirement_without_a_hash_is_refused(line: str) -> None:
    lock.refuse_unhashed("appliance", GOOD)
    with pytest.raises(BuildError, match="without a hash"):
        lock.refuse_unhashed("appliance", f"{GOOD}{line}\n")


def test_an_input_of_a_build_without_a_hash_is_refused(tmp_path: Path) -> None:
    paths = [Path("appliance"), Path("images/locks/a.txt"), Path("images/locks/b.txt"), Path("images/locks/gone.txt")]
    (tmp_path / "images/locks").mkdir(parents=True)
    (tmp_path / paths[1]).write_text(GOOD)
    (tmp_path / paths[2]).write_text(GOOD)
    lock.refuse_unhashed_inputs(tmp_path, paths)
    (tmp_path / paths[2]).write_text(f"{GOOD}idna==3.20\n")
    with pytest.raises(MatrixError, match=r"images/locks/b\.txt holds .* idna==3\.20") as caught:
        lock.refuse_unhashed_inputs(tmp_path, paths)
    assert caught.value.hint == "python -m images lock b"


def test_uv_is_asked_for_one_platform_and_given_certificates() -> None:
    argv = lock.uv_argv("dev", "wheels", Path("x.txt"), ca_bundle=Path("/ca.pem"), upgrade=True)
    assert argv[:2] == ("env", "SSL_CERT_FILE=/ca.pem")
    assert {"--generate-hashes", "--only-binary", "x86_64-manylinux_2_28", "--upgrade"} <= set(argv)
    assert argv[-1] == "images/locks/dev.in"
    sdist = lock.uv_argv("llama-source", "sdist", Path("x.txt"), ca_bundle=None, upgrade=False)
    assert "--no-deps" in sdist
    assert not {"env", "--only-binary", "--upgrade"} & set(sdist)


def test_an_engine_is_locked_for_both_platforms_and_may_override() -> None:
    overrides = Path("images/locks/vllm-cu130.overrides")
    argv = lock.uv_argv("vllm-cu130", "engine", Path("x.txt"), ca_bundle=None, upgrade=False, overrides=overrides)
    assert ("--override", overrides.as_posix()) == argv[argv.index("--override") : argv.index("--override") + 2]
    assert lock.FORMS["engine"][-1] in argv
    assert lock.ALSO_FOR["engine"].startswith("aarch64-")
    lock.refuse_differing("x", GOOD, GOOD)
    with pytest.raises(BuildError, match=r"lock x would not fit every platform, which differ in: idna==3.20$"):
        lock.refuse_differing("x", GOOD, f"{GOOD}idna==3.20 \\\n    --hash={HASH}\n")


def test_every_engine_lock_says_why_it_overrides(project: Path) -> None:
    for path in (project / "images/locks").glob("*.overrides"):
        assert path.with_suffix(".in").is_file()
        assert path.read_text("utf-8").startswith("# ")


def test_an_unhashed_wheel_in_the_engines_lock_fails_render(project: Path, tmp_path: Path) -> None:
    path = Path("images/locks/vllm-cu130.txt")
    (tmp_path / path).parent.mkdir(parents=True)
    text = (project / path).read_text("utf-8")
    (tmp_path / path).write_text(text)
    lock.refuse_unhashed_inputs(tmp_path, [path])
    (tmp_path / path).write_text(re.sub(r"^(triton==\S+) \\\n(?:    --hash.*\n)+", r"\1\n", text, flags=re.MULTILINE))
    with pytest.raises(MatrixError, match=r"vllm-cu130\.txt holds .* without a version or a hash: triton==") as caught:
        lock.refuse_unhashed_inputs(tmp_path, [path])
    assert caught.value.hint == "python -m images lock vllm-cu130"


def test_a_lock_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "images/locks"
    folder.mkdir(parents=True)
    (folder / "x.in").write_text("not a requirement ===\n")
    (folder / "x.txt").write_text(GOOD)
    with pytest.raises(BuildError, match="uv could not lock x"):
        lock.lock(tmp_path, "x", "wheels", ca_bundle=None, upgrade=False)
    assert {path.name: path.read_text() for path in folder.iterdir()}["x.txt"] == GOOD
    assert sorted(path.name for path in folder.iterdir()) == ["x.in", "x.txt"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder, with one release that asks for nothing."""
    folder = tmp_path / "simple"
    for name in ("wanted", "stranger"):
        (folder / name).mkdir(parents=True)
        wheel = folder / name / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        link = f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>'
        (folder / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    monkeypatch.setenv("UV_DEFAULT_INDEX", folder.as_uri())
    (tmp_path / "images/locks").mkdir(parents=True)
    (tmp_path / "images/locks/x.in").write_text("wanted\n")
    return folder


def _digest(index: Path, name: str) -> str:
    return hashlib.sha256((index / name / f"{name}-1.0-py3-none-any.whl").read_bytes()).hexdigest()


@pytest.mark.thorough
def test_a_stranger_and_a_flipped_digit_are_found_by_asking_again(index: Path, tmp_path: Path) -> None:
    locks = tmp_path / "images/locks"
    assert lock.lock(tmp_path, "x", "wheels", ca_bundle=None, upgrade=False)
    sound = (locks / "x.txt").read_text()
    assert lock.faults(tmp_path, "x", "wheels", ca_bundle=None) == []
    own, stranger = _digest(index, "wanted"), _digest(index, "stranger")
    flipped = own[:-1] + ("0" if own[-1] != "0" else "1")
    planted = sound.replace(own, flipped) + f"stranger==1.0 \\\n    --hash=sha256:{stranger}\n"
    (locks / "x.txt").write_text(planted)
    assert lock.faults(tmp_path, "x", "wheels", ca_bundle=None) == [
        "x: nothing asks for stranger==1.0",
        f"x: wanted==1.0: no file of the index has SHA-256 {flipped}",
    ]
    assert (locks / "x.txt").read_text() == planted
    assert sorted(path.name for path in locks.iterdir()) == ["SHA256SUMS", "x.in", "x.txt"]
    (locks / "x.txt").unlink()
    assert lock.faults(tmp_path, "x", "wheels", ca_bundle=None) == ["x: there is no lock"]


def test_what_is_missing_is_named_and_a_later_file_of_a_release_is_no_fault() -> None:
    one, two = frozenset("1"), frozenset("12")
    assert list(lock.differences({"a==1": one}, {"a==1": two})) == []
    assert list(lock.differences({"a==1": two}, {"a==1": one, "b==2": one})) == [
        "b==2 is missing",
        "a==1: no file of the index has SHA-256 2",
    ]


def test_every_pin_of_a_lock_is_read_with_its_hashes(project: Path) -> None:
    """Markers belong to the pin: uv is told them, and what it answers has them."""
    for path in (project / "images/locks").glob("*.txt"):
        text = path.read_text("utf-8")
        pins = lock.parse_pins(text)
        assert len(pins) == len(re.findall(r"^\S+==", text, re.MULTILINE))
        assert sum(map(len, pins.values())) == text.count("--hash=sha256:")
