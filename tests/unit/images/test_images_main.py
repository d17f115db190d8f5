"""The command line as a user types it."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from images import __main__ as command

VERBS = (
    "list", "render", "build", "verify", "gate", "gaps", "sbom", "bake", "ci-matrix", "prune", "explain", "select",
    "lock", "fetch",
)  # fmt: skip


def test_list_prints_cells_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "llama-cpu" in [row["id"] for row in rows]
    assert all(row["size_budget_mib"] > 0 for row in rows)


def test_render_check_is_quiet_about_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["render", "--check"]) == 0
    assert "images/rendered/llama-cpu/Dockerfile\n" in capsys.readouterr().out


def test_render_check_names_the_file_that_differs(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    changed = tmp_path / "images/rendered/llama-cpu/Dockerfile"
    changed.write_text(changed.read_text("utf-8") + "RUN curl\n", "utf-8")
    done = _run(tmp_path, "render", "--check")
    assert done.returncode == 61
    assert "images/rendered/llama-cpu/Dockerfile: differs" in done.stderr
    assert "hint: python -m images render" in done.stderr


def test_a_wheel_without_a_hash_is_exit_10_and_named(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    path = tmp_path / "images/locks/appliance.txt"
    text = path.read_text("utf-8")
    path.write_text(re.sub(r"(?m)^(idna==\S+) \\\n(?:    --hash=\S+(?: \\)?\n)+", r"\1\n", text), "utf-8")
    done = _run(tmp_path, "render")
    assert done.returncode == 10
    assert "images/locks/appliance.txt holds a requirement without a version or a hash: idna==" in done.stderr


def test_generated_files_are_held_to_the_matrix(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    assert _run(tmp_path, "render").returncode == 0
    assert _run(tmp_path, "render", "--check").returncode == 0
    for name in ("docker-bake.json", ".github/images.json"):
        path = tmp_path / name
        text = path.read_text("utf-8")
        path.write_text(text.replace("llama-cpu", "llama-gpu"), "utf-8")
        done = _run(tmp_path, "render", "--check")
        assert done.returncode == 61
        assert f"{name}: differs" in done.stderr
        path.write_text(text, "utf-8")


@pytest.mark.parametrize(("verb", "file"), [("bake", "docker-bake.json"), ("ci-matrix", ".github/images.json")])
def test_one_generated_file_is_written_by_its_verb(project: Path, tmp_path: Path, verb: str, file: str) -> None:
    _copy(project, tmp_path)
    assert _run(tmp_path, verb, "--dry-run").returncode == 0
    assert not (tmp_path / file).exists()
    done = _run(tmp_path, verb)
    assert (done.returncode, done.stdout) == (0, f"{file}\n")
    assert (tmp_path / file).read_bytes() == (project / file).read_bytes()


def test_one_file_for_several_bills_of_materials_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["sbom", "--only", "llama-*", "--out", "x.json"]) == 2
    assert "--out names one file" in capsys.readouterr().err


def test_a_mirror_that_is_none_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--debian-mirror", "mirror"]) == 2
    assert "--debian-mirror is no address of a mirror: mirror" in capsys.readouterr().err


MIRROR = "http://127.0.0.1:9@20260718T020000Z"


def test_a_reproduction_is_made_of_what_a_build_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    """The sources of a mirror, and the refusal of an image that does not exist, which asks no network."""
    given = ["verify", "--reproduce", "llama-cpu", "--dry-run", "--json"]
    assert command.main([*given, "--debian-mirror", MIRROR]) == 0
    (argv,) = json.loads(capsys.readouterr().out)
    assert argv[argv.index("--file") + 1].endswith("/llama-cpu.mirror/Dockerfile")
    assert any(word.startswith("id=debian-base.list,src=") for word in argv)
    assert "--no-cache" in argv
    assert command.main([*given, "--toolkit-image", "cuda:1"]) == 2
    assert "--toolkit-image fits no cell whose CUDA toolkit comes from no image: llama-cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("--base", "auto"), ("--toolkit-image", "x:1"), ("--debian-mirror", MIRROR), ("--epoch", "5")]
)
def test_what_only_a_reproduction_takes_is_not_passed_over(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["verify", "--only", "llama-cpu", flag, value]) == 2
    assert f"{flag} belongs to --reproduce, which is not there: {value}" in capsys.readouterr().err


def test_locked_alone_belongs_to_a_reproduction(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["verify", "--only", "llama-cpu", "--locked"]) == 2
    said = capsys.readouterr().err
    assert "--locked belongs to --reproduce, which is not there\n" in said
    assert "hint: verify --reproduce CELL --locked\n" in said


@pytest.mark.parametrize(("flag", "value"), [("--image", "x:1"), ("--only", "llama-*"), ("--cuobjdump", "/x")])
def test_what_a_reproduction_has_no_use_for_is_not_passed_over(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["verify", "--reproduce", "llama-cpu", flag, value]) == 2
    assert f"{flag} does not go with --reproduce llama-cpu" in capsys.readouterr().err


def test_a_debian_lock_takes_no_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lock", "--debian", "dev"]) == 2
    assert "takes no names: dev" in capsys.readouterr().err


def test_a_mirror_of_a_lock_that_asks_no_archive_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lock", "dev", "--debian-mirror", MIRROR]) == 2
    assert f"--debian-mirror belongs to --debian, which is not there: {MIRROR}" in capsys.readouterr().err


def test_the_hint_of_a_mirror_is_one_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--debian-mirror", "2026-07-11T10:16:37Z"]) == 2
    named = re.findall(r"--debian-mirror (http\S+)", capsys.readouterr().err)
    assert len(named) == 2
    for each in named:
        assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--debian-mirror", each]) == 0


def test_a_misspelt_key_of_the_file_is_exit_10(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    path = tmp_path / "build_matrix.yaml"
    path.write_text(path.read_text("utf-8").replace("size_budget_mib", "size_budget_mb"), "utf-8")
    done = _run(tmp_path, "list")
    assert done.returncode == 10
    assert "hint: perhaps you meant size_budget_mib" in done.stderr


def test_a_dry_build_prints_a_command_that_a_shell_understands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--epoch", "1700000000", "--tag", "x:1"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["docker", "buildx", "build"]
    assert "SOURCE_DATE_EPOCH=1700000000" in words
    assert any(word.startswith("type=oci,name=x:1,") for word in words)


def test_a_dry_verify_names_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["verify", "--dry-run", "--json"]) == 0
    assert "no_secret_files" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["list", "--only", "lama-cpu"], "perhaps you meant llama-cpu"),
        (["lock", "aplience"], "perhaps you meant appliance"),
    ],
)
def test_a_name_that_is_not_there_is_exit_2_with_the_near_miss(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(argv) == 2
    assert f"hint: {hint}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_help_explains_each_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([verb, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "exit codes:" in said
    assert "--json" in said


@pytest.mark.parametrize("seconds", ["-5", "99999999999999", "today"])
def test_a_date_that_no_archive_can_hold_is_exit_2(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--epoch", seconds]) == 2
    assert f"not the seconds of a date since 1970: {seconds}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["verify", "sbom"])
def test_one_image_for_several_cells_is_exit_2(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([verb, "--only", "llama-*", "--image", "x:1", "--dry-run"]) == 2
    assert "--image names one image, but" in capsys.readouterr().err


def test_an_unknown_chip_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["gate", "x.so", "--sm", "33", "--dry-run"]) == 2
    assert "error: no chip of images/facts/nvidia.yaml has that number: 33" in capsys.readouterr().err


def test_a_library_that_is_not_there_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["gate", str(tmp_path / "x.so"), "--sm", "90"]) == 2
    assert f"error: no such file: {tmp_path / 'x.so'}" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--bases", "--debian"), ("--upgrade", "--bases"), ("--debian", "--upgrade")])
def test_one_thing_is_locked_at_a_time(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lock", *flags, "--dry-run"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("build_matrix.yaml", b"a:\n\t- b", "build_matrix.yaml cannot be read: "),
        ("images/locks/appliance.txt", b"\xff", "lock cannot be read: images/locks/appliance.txt: "),
        ("images/facts/nvidia.yaml", b"a: [b", "images/facts/nvidia.yaml cannot be read: "),
        ("images/facts/vllm.yaml", b"a: [b", "images/facts/vllm.yaml cannot be read: "),
        ("images/models/demo.yaml", b"\xff", "images/models/demo.yaml cannot be read: "),
    ],
)
def test_a_file_that_is_none_is_one_line_and_exit_10(
    project: Path, tmp_path: Path, file: str, content: bytes, words: str
) -> None:
    _copy(project, tmp_path)
    (tmp_path / file).write_bytes(content)
    verb = ("fetch", "demo", "--dry-run") if "models" in file else ("render",)
    done = _run(tmp_path, *verb)
    assert done.returncode == 10
    assert words in done.stderr
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] in (["error"], ["error", "hint"])


def test_a_rendered_file_that_is_no_text_is_drift(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    (tmp_path / "images/rendered/llama-cpu/Dockerfile").write_bytes(b"\xff")
    done = _run(tmp_path, "render", "--check")
    assert done.returncode == 61
    assert "images/rendered/llama-cpu/Dockerfile: differs" in done.stderr


def test_a_folder_that_cannot_be_made_is_exit_60(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert command.main(["fetch", "demo", "--to", str(tmp_path / "file" / "models")]) == 60
    assert "error: folder for the weights cannot be made: " in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_exit_60(project: Path, tmp_path: Path) -> None:
    """Wherever that shows: here a folder stands where a generated file belongs."""
    _copy(project, tmp_path)
    (tmp_path / "docker-bake.json").mkdir()
    done = _run(tmp_path, "bake")
    assert done.returncode == 60
    assert done.stderr.startswith("error: a file cannot be used: ")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_ends_it_in_silence(project: Path) -> None:
    words = f"set -o pipefail; {shlex.quote(sys.executable)} -m images list --json | true"
    done = subprocess.run(["bash", "-c", words], cwd=project, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_patch_that_is_missing_is_named_before_a_build(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    (tmp_path / "images/patches/llama-amx-tiles.patch").rename(tmp_path / "images/patches/llama-amx-tile.patch")
    for verb in (["list"], ["render", "--check"]):
        done = _run(tmp_path, *verb)
        assert done.returncode == 10
        assert "names files that are not there: images/patches/llama-amx-tiles.patch" in done.stderr
        assert "hint: perhaps you meant images/patches/llama-amx-tile.patch" in done.stderr


def test_a_folder_of_a_cell_that_is_gone_fails_the_check(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    shutil.copytree(tmp_path / "images/rendered/llama-cpu", tmp_path / "images/rendered/llama-cu130-sm87")
    done = _run(tmp_path, "render", "--check")
    assert done.returncode == 61
    assert "images/rendered/llama-cu130-sm87: no cell of the matrix is called that" in done.stderr


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        (["lst"], "invalid choice: 'lst'", "perhaps you meant list"),
        (["list", "--jsn"], "unrecognized arguments: --jsn", "perhaps you meant --json"),
        (["select", "--drivr", "580"], "unrecognized arguments: --drivr", "perhaps you meant --driver"),
        (["select", "--platform", "linux/amd46"], "invalid choice: 'linux/amd46'", "perhaps you meant linux/amd64"),
        ([], "the following arguments are required: VERB", "python3 -m images --help"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_near_one(
    argv: list[str], said: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(argv) == 2
    err = capsys.readouterr().err
    assert said in err
    assert f"hint: {hint}" in err


def test_errors_are_data_where_data_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--only", "llama-cpx", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err) == {
        "error": "no cell matches: llama-cpx", "hint": "perhaps you meant llama-cpu", "exit_code": 2
    }  # fmt: skip
    assert command.main(["lst", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["hint"].startswith("perhaps you meant list")


def test_every_cell_is_built_only_when_that_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert command.main(["build"]) == 2
    err = capsys.readouterr().err
    assert "build without --only means all 37 cells: llama-cpu, llama-cu124-sm75" in err
    assert "--all builds them all" in err
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert command.main(["build"]) == 2
    assert "build 37 images, about half an hour each? [y/N] " in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_engine_that_does_not_run_is_exit_60(project: Path) -> None:
    environment = ("env", "DOCKER_HOST=unix:///nonexistent/docker.sock")
    done = _run(project, "build", "--all", "--base", "auto", before=environment)
    assert done.returncode == 60
    assert "the Docker engine does not answer" in done.stderr
    assert "docker info" in done.stderr


def _run(root: Path, *argv: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [*before, sys.executable, "-m", "images", *argv]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)


def _copy(project: Path, target: Path) -> None:
    """What `render` reads, so that a test may damage it."""
    needed = ("__init__.py", "documents.py", "image_facts.py", "values.py")
    sources = [project / "build_matrix.yaml", *(project / "appliance" / name for name in needed)]
    sources += [path for path in (project / "images").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for source in sources:
        copy = target / source.relative_to(project)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
