"""What the pages print works as it stands there, on a machine without an activated environment.

Commands that change nothing are run, with `--dry-run` where they have it; of the others every word is checked by the
parser that would read it. What is not run is listed with the reason, as a skipped test. A command that stands on
several pages is tried once, and is called by the first of them.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.__main__ import HOST_VERBS, _parse
from appliance.host.__main__ import parse as host_command
from images.__main__ import parser
from tests.process.stages.boot import Home
from tests.process.stages.gateway import KEY, on_stage

ROOT = Path(__file__).parents[2]
PAGES = (
    # README.zh-CN.md has the same commands, which a unit test sees to.
    *("README.md", "images/README.md", "images/decisions.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))),
)
BEGINS = ("make", "python", "python3", "docker", "pip", "uv", "appliance")
# Inside a line: a program and what it is told; `docker run` and `python3 -m images` alone are names.
SPAN = re.compile(r"`((?:python\d? -m (?:images \S|benchmarks\.\w)|(?!python|docker run`)\w+ )[^`]*)`")
PLACEHOLDERS = re.compile(r"[A-Z][A-Z_]{3,}|[A-Z]…|…|REGISTRY|registry\.example")
# Of the rest, with --dry-run, is asked what every machine can say.
NOT_RUN = {
    "select": "asks nvidia-smi of this machine",
    "fetch": "fetches from a package registry",
    "lock": "asks a package registry",
    "sbom": "needs the image",
    "prune": "asks Docker what builds left",
    "gate": "needs a file with GPU code",
    "gaps": "needs the wheels of an engine",
}


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        """The words of the command, without comments and without what is redirected into it."""
        return shlex.split(re.sub(r"\[[^]]*\]", "", self.text.partition(" <")[0]), comments=True)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def commands() -> Iterator[Command]:
    for page in PAGES:
        lines = (ROOT / page).read_text().splitlines()
        for number, line in enumerate(lines, 1):
            if line.startswith("    ") and line.strip().split(" ")[0] in BEGINS:
                yield Command(page, number, _whole(lines[number - 1 :]))
            elif not line.startswith("    "):
                for span in SPAN.findall(line):
                    if span.split()[0] in BEGINS:
                        yield Command(page, number, span)


def _whole(lines: list[str]) -> str:
    """Return the first line, joined with the lines that continue it."""
    text = lines[0].strip()
    for line in lines[1:]:
        if not text.endswith("\\"):
            break
        text = text[:-1] + line.strip()
    return text


ALL = list(commands())


def those(*begin: str) -> list[Command]:
    """Return each distinct command that begins with these words, at the first place that prints it."""
    found = (command for command in ALL if tuple(command.words[: len(begin)]) == begin)
    return list({tuple(command.words): command for command in reversed(list(found))}.values())[::-1]


def test_there_are_commands_of_each_kind() -> None:
    assert all(
        those(*begin) for begin in (("make",), ("python3", "-m", "images"), ("docker", "run"), ("docker", "exec"))
    )


def test_one_way_everywhere() -> None:
    """`python` is not there on Debian, `pip` and `uv` would need an environment."""
    for command in ALL:
        assert command.words[0] in ("make", "python3", "docker", "appliance"), f"{command}: another way to start it"
        if command.words[0] == "python3":
            assert command.words[1] == "-m", command
            assert command.words[2] == "images" or command.words[2].startswith("benchmarks."), command


@pytest.mark.parametrize("command", those("make"), ids=str)
def test_make_knows_it(command: Command) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


# Programs by their own command lines, one after the other in one process: they import the same things.
RUN_ALL = """
import contextlib, io, json, runpy, sys
told = []
for module, *words in json.load(sys.stdin):
    sys.argv = [module, *words]
    said, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
    told.append([code, said.getvalue(), wrong.getvalue()])
json.dump(told, sys.stdout)
"""


def run_all(asked: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each program and its words."""
    argv = [sys.executable, "-c", RUN_ALL]
    done = subprocess.run(
        argv, cwd=ROOT, input=json.dumps(asked), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [tuple(each) for each in json.loads(done.stdout.rpartition("\n")[2])]  # what they start may write as well
    assert len(told) == len(asked)
    return told


OF_IMAGES = those("python3", "-m", "images")


def why_not_run(words: list[str]) -> str | None:
    """Return why a command of `images` is only parsed; None if it is run."""
    if "|" in words[0]:
        return "it is the list of verbs"
    if PLACEHOLDERS.search(" ".join(words)):
        return "it has a placeholder"
    if words[0] in NOT_RUN and "--driver" not in words:
        return NOT_RUN[words[0]]
    return "it builds twice" if "--reproduce" in words else None


@pytest.mark.parametrize("command", OF_IMAGES, ids=str)
def test_images_understands_it(command: Command) -> None:
    words = command.words[3:]
    if "|" in words[0]:  # the list of verbs
        assert set(words[0].split("|")) <= set(re.findall(r"[a-z-]+", parser().format_help()))
    else:
        parser().parse_args(words)
    if why := why_not_run(words):
        pytest.skip(f"not run: {why}: {command.text}")


def test_images_does_it() -> None:
    """Commands that would change something run with --dry-run."""
    asked = []
    for command in OF_IMAGES:
        words = command.words[3:]
        if not why_not_run(words):
            changes = not parser().parse_args(words).dry_run and words[0] not in ("list", "explain", "select")
            asked.append(["images", *words, *(["--dry-run"] if changes else [])])
    for (_, verb, *words), (code, _, wrong) in zip(asked, run_all(asked), strict=True):
        # 10: `explain` of a cell that cannot exist, which is what the page shows.
        assert code in ((0, 10) if verb == "explain" else (0,)), f"{verb} {words}: {wrong}"
        assert "Traceback" not in wrong


def test_a_benchmark_takes_these_words() -> None:
    """The words are looked for in --help, because each benchmark measures for minutes."""
    found = [command for command in those("python3", "-m") if command.words[2] != "images"]
    modules = sorted({command.words[2] for command in found})
    helps = dict(zip(modules, run_all([[module, "--help"] for module in modules]), strict=True))
    for command in found:
        code, said, wrong = helps[command.words[2]]
        assert code == 0, f"{command}: {wrong}"
        assert set(words_with_dashes(command.words)) <= set(re.findall(r"--[a-z-]+", said)), command


def words_with_dashes(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


@pytest.mark.parametrize("command", [*those("docker"), *those("appliance")], ids=str)
def test_the_command_line_inside_the_image_understands_it(command: Command) -> None:
    words = command.words
    if words[:2] == ["docker", "exec"]:
        inner = words[words.index("appliance") + 1 :]
    elif words[:2] == ["docker", "run"]:
        (at, *_) = (at for at, word in enumerate(words) if re.match(r"appliance(/\w+)?(:[\w-]+)?$", word))
        inner = words[at + 1 :]
    elif words[0] == "appliance" and words[1] in HOST_VERBS:
        host_command(words[1:])
        pytest.skip(f"not run: it starts or asks containers of this machine: {command.text}")
    elif words[0] == "appliance":
        inner = words[1:]
    else:
        pytest.skip(f"not ours: {command.text}")
    if "--help" in inner:
        with pytest.raises(SystemExit) as ended:
            _parse(inner)
        assert ended.value.code == 0
    else:
        _parse(inner or ["serve"])
    pytest.skip(f"not run: it needs a container: {command.text}")


ADDRESS = re.compile(r"(?:https?://)?(?:127\.0\.0\.1|localhost|\[::1\]|HOST|NAME):11435(/[^\s`\"')|,;]*)")
ROUTE = re.compile(r"`(?:[A-Z]+ )?(/(?:v1|api|health|metrics|appliance|chat)(?:/[^`\s]*)?)`")
BASES = ("/v1", "/v1/")  # what a client puts its own paths behind
# Answered by the leader of several hosts alone: test_vllm_hosts.py.
OF_HOSTS = "/appliance/v1/group"


def addresses() -> Iterator[tuple[str, str]]:
    """Yield page and path of each address of our port, with host or without, in the READMEs and all pages."""
    for page in ("README.zh-CN.md", *PAGES):
        text = (ROOT / page).read_text("utf-8")
        for path in dict.fromkeys((*ADDRESS.findall(text), *ROUTE.findall(text))):
            before, braced, after = re.fullmatch(r"([^{]*)(?:\{([^}]*)\}(.*))?", path).groups()  # type: ignore[union-attr]
            for word in (braced or "").split(","):
                whole = f"{before}{word}{after or ''}".rstrip(".")
                if whole not in BASES and whole != OF_HOSTS and not whole.endswith("*"):
                    yield page, whole


def test_every_address_of_our_port_is_answered(tmp_path: Path) -> None:
    found = list(addresses())
    assert {"/v1/models", "/v1/chat/completions", "/appliance/v1/hardware", "/health/live"} <= {p for _, p in found}
    home = Home.make(tmp_path / "home")
    with home.serving() as serving:
        serving.wait_ready()
        # A stream of events has no end: of that one the head is asked for.
        methods = {path: "HEAD" if path.startswith("/appliance/v1/events") else "GET" for _, path in found}
        answers = {path: serving.ask(method, path, key=home.key) for path, method in methods.items()}
        serving.terminate()
    unknown = {path for path, (status, body) in answers.items() if (status, code_of(body)) == (404, "not_found")}
    assert not [(page, path) for page, path in found if path in unknown]


def code_of(body: object) -> object:
    error = body.get("error") if isinstance(body, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def test_the_python_snippet_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert f"```python\n{snippet}```" in (ROOT / "README.zh-CN.md").read_text()
    with on_stage("fake_engine.py", "--alias", "demo") as stage:
        mine = snippet.replace("http://127.0.0.1:11435", stage.url).replace('api_key="…"', f'api_key="{KEY}"')
        assert mine.count(stage.url) == mine.count(KEY) == 1
        done = subprocess.run([sys.executable, "-c", mine], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "the answer"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of the code that hands over to .venv, with a `make venv` whose Python prints what it was asked to
    run."""
    (tmp_path / "images").mkdir()
    for name in ("images/__init__.py", "images/own_python.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "images/__main__.py").write_text("import images.own_python\nimport jinja2\n")
    script = '#!/bin/sh\\necho ran "$$@"\\n'
    recipe = f"\t@echo making it with $(PYTHON)\n\t@mkdir -p .venv/bin && printf '{script}' >.venv/bin/python\n"
    (tmp_path / "Makefile").write_text(f"venv:\n{recipe}\t@chmod +x .venv/bin/python\n")
    return tmp_path


def bare(clone: Path, *words: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    """Run `images` with -S: only the standard library is there."""
    argv = [sys.executable, "-S", "-m", "images", *words]
    env = {"PATH": path}
    return subprocess.run(argv, cwd=clone, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_a_bare_python_makes_the_environment_and_hands_over(clone: Path) -> None:
    done = bare(clone, "select", "--gpu", "RTX 5090")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran -S -m images select --gpu RTX 5090\n"
    assert done.stderr == f"making it with {sys.executable}\n", "stdout is data"


def test_an_environment_that_cannot_be_made_is_said(clone: Path) -> None:
    (clone / "Makefile").write_text("venv:\n\t@echo no such mirror >&2; false\n")
    done = bare(clone, "list")
    assert done.returncode == 60
    assert "no such mirror" in done.stderr
    assert "error: the Python environment cannot be made: make venv ended with an error" in done.stderr
    assert "hint: " in done.stderr


def test_without_make_it_is_said_what_is_missing(clone: Path) -> None:
    done = bare(clone, "list", path=str(clone))
    assert done.returncode == 60
    assert f"error: {sys.executable} lacks debian, docker, elftools, jinja2" in done.stderr
    assert "hint: install make" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_environment_that_lacks_something_itself_does_not_hand_over_again(clone: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(clone / ".venv")], check=True, timeout=300)
    argv = [str(clone / ".venv/bin/python"), "-m", "images", "list"]
    done = subprocess.run(argv, cwd=clone, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 60
    assert "error: the Python environment is damaged: " in done.stderr
    assert "hint: rm -r .venv, then make venv" in done.stderr
