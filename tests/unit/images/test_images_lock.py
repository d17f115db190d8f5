from __future__ import annotations

import re
from pathlib import Path

import pytest

from images import lock
from images.errors import BuildError, MatrixError

HASH = "sha256:" + "0" * 64
GOOD = f"yarl==1.0 \\\n    --hash={HASH} \\\n    --hash={HASH}\n    # via -r images/locks/appliance.in\n"


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
