"""The command line as a user types it."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from images import __main__ as command
from images import console, docker
from images.matrix import matrix, render
from images.verbs.write.render import mend, ungated


def test_list_prints_cells_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "llama-cpu" in [row["id"] for row in rows]
    assert all(row["size_budget_mib"] > 0 for row in rows)
    # Names that scripts and workflows read: none of them may be called otherwise.
    assert {tuple(row) for row in rows} == {(
        "id", "engine", "cuda", "sm", "platforms", "base", "status", "toolkit", "gencode", "cpu_variants",
        "size_budget_mib", "state", "states", "proofs", "needs",
    )}  # fmt: skip
    cpu, cuda = (next(row for row in rows if row["id"].startswith(name)) for name in ("llama-cpu", "llama-cu"))
    assert (cpu["cuda"], cpu["sm"], cpu["toolkit"], cpu["gencode"]) == (None, None, None, None)
    assert cuda["id"].startswith(f"llama-cu{cuda['cuda'].replace('.', '')}")
    assert set(cpu["states"]) == set(cpu["platforms"].split(","))
    assert ":" in cpu["base"]


@pytest.mark.thorough
def test_render_check_is_quiet_about_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["render", "--check"]) == 0
    assert "images/rendered/llama-cpu/Dockerfile\n" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "code"), [("list --only llama-cpu >&-", 0), ("lst 2>/dev/full", 2), ("lst 2>&-", 2), ("lst >&- 2>&-", 2)]
)
def test_streams_that_nobody_reads_change_no_exit_code(words: str, code: int, project: Path) -> None:
    done = docker.capture(("sh", "-c", f"'{sys.executable}' -m images {words}"), cwd=project)
    assert (done.code, [line for line in done.lines if "Traceback" in line]) == (code, [])


@pytest.mark.parametrize("words", ["build --indexurl https://u:secret@host/simple", "build --only https://secret@host"])
def test_no_error_repeats_a_password(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), ("--json",)):
        assert command.main([*words.split(), *more]) == 2
        said = capsys.readouterr().err
        assert "secret" not in said
        assert "host" in said
    snapshot = "http://snapshot.example@20260718T020000Z"
    assert console.USERINFO.sub("", snapshot) == snapshot


def test_the_beginning_of_an_id_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--only", "llama-cu130"]) == 2
    said = capsys.readouterr().err
    assert "--only 'llama-cu130*' is llama-cu130-sm75, " in said
    assert "vllm" not in said


def test_a_report_on_wheels_that_is_gone_is_drift(project: Path, tmp_path: Path) -> None:
    loaded = matrix.load(project)
    assert ungated(project, loaded) == []
    shutil.copytree(project / "images/gaps", tmp_path / "images/gaps")
    (tmp_path / "images/gaps/vllm-cu130-sm90.yaml").unlink()
    path = "images/gaps/vllm-cu130-sm90.yaml"
    assert ungated(tmp_path, loaded) == [f"{path}: missing: git checkout {path}"]
    assert mend(ungated(tmp_path, loaded)) == f"git checkout {path}"


def test_what_render_does_not_take_away_has_its_own_hint() -> None:
    moved, left = "a: differs from what the matrix renders", "b/c: nothing renders it: git rm -r b/c"
    assert mend([moved]) == f"{render.RENDER_COMMAND}, then commit what it wrote"
    assert mend([left, "d: no cell of the matrix is called that: git rm -r d"]) == "git rm -r b/c d"
    assert mend([moved, left]) == f"{render.RENDER_COMMAND}, then commit what it wrote; git rm -r b/c"


def test_one_file_for_several_bills_of_materials_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["sbom", "--only", "llama-*", "--out", "x.json"]) == 2
    assert "--out names one file" in capsys.readouterr().err


def test_a_mirror_that_is_none_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--debian-mirror", "mirror"]) == 2
    assert "--debian-mirror is no address of a mirror: mirror" in capsys.readouterr().err


MIRROR = "http://127.0.0.1:9@20260718T020000Z"


@pytest.mark.thorough
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


@pytest.mark.parametrize("flag", ["--upgrade", "--bases"])
def test_a_check_of_locks_writes_nothing(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lock", "--check", flag]) == 2
    assert f"error: --check writes nothing, and {flag} is there to write\n" in capsys.readouterr().err


def test_a_debian_lock_takes_no_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lock", "--debian", "dev"]) == 2
    assert "takes no names: dev" in capsys.readouterr().err


def test_a_mirror_of_a_lock_that_asks_no_archive_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lock", "dev", "--debian-mirror", MIRROR]) == 2
    assert f"--debian-mirror belongs to --debian, which is not there: {MIRROR}" in capsys.readouterr().err
    assert command.main(["lock", "appliance", "--platform", "linux/arm64"]) == 2
    assert "--platform belongs to --debian, which is not there: linux/arm64" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_hint_of_a_mirror_is_one_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--debian-mirror", "2026-07-11T10:16:37Z"]) == 2
    named = re.findall(r"--debian-mirror (http\S+)", capsys.readouterr().err)
    assert len(named) == 2
    for each in named:
        assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--debian-mirror", each]) == 0


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


@pytest.mark.parametrize("verb", command.VERBS)
def test_help_explains_each_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([verb, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "exit codes:" in said
    assert "--json" in said


def test_help_imports_no_verb(project: Path) -> None:
    """The libraries of the verbs cost a second, which a look at the list must not."""
    program = (
        "import contextlib, sys\nfrom images.__main__ import main\n"
        "with contextlib.suppress(SystemExit):\n    main(['--help'])\n"
        "print(sorted({'docker', 'pydantic', 'yaml', 'jinja2', 'images.matrix'} & sys.modules.keys()))\n"
    )
    done = docker.capture((sys.executable, "-c", program), cwd=project)
    assert (done.code, done.lines[-1]) == (0, "[]")
    assert any(line.split()[:1] == ["select"] for line in done.lines)


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


def test_a_folder_that_cannot_be_made_is_exit_60(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert command.main(["fetch", "demo", "--to", str(tmp_path / "file" / "models")]) == 60
    assert "error: folder for the weights cannot be made: " in capsys.readouterr().err


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
    assert "build without --only means all 38 cells: llama-cpu, llama-cu124-sm75" in err
    assert "--all builds them all" in err
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert command.main(["build"]) == 2
    assert "build 38 images, about half an hour each? [y/N] " in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _single_valued() -> Iterator[tuple[str, str]]:
    """Yield each verb with each of its flags that take one value, and a valid value."""
    values = {"--epoch": "1", "--memory-mib": "1", "--platform": "linux/amd64", "--debian-mirror": "http://a"}
    addresses = ("--source", "--url", "--index-url")
    for verb, parser in next(iter(command.parser()._subparsers._group_actions)).choices.items():  # type: ignore[union-attr]
        parser.fill()
        for action in parser._actions:
            for flag in action.option_strings if isinstance(action, console.Once) else ():
                value = "https://a.example/" if flag in addresses else values.get(flag, "x")
                yield verb, f"{flag}={value}"


@pytest.mark.parametrize(("verb", "word"), list(_single_valued()))
def test_a_flag_of_one_value_is_not_given_twice(verb: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([verb, word, word]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {word.partition('=')[0]} is given twice")
    assert ("https://a.example/" in said) is ("a.example" in word and "index" not in word)
    assert f"hint: it takes one value; python3 -m images {verb} --help" in said


@pytest.mark.thorough
def test_flags_of_several_values_are_given_again() -> None:
    words = ["--gpu", "RTX 3090", "--gpu", "RTX 5090", "--driver", "580.65.06", "--platform", "linux/amd64"]
    assert command.main(["select", *words]) == 0
    assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--cache-from", "a", "--cache-from", "b"]) == 0
