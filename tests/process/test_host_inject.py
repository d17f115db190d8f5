"""`inject` in a home of its own: what it writes, what it takes out again, and what it leaves alone."""

from __future__ import annotations

import json
import os
import pty
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.test_host_bench import endpoint

ROOT = Path(__file__).parents[2]
KEY = "sk-app-0123456789"
FILES = {
    "continue": ".continue/config.yaml",
    "claude-code": ".claude/settings.json",
    "opencode": ".config/opencode/opencode.json",
    "aider": ".aider.conf.yml",
    "zed": ".config/zed/settings.json",
    "open-webui": "webui.env",
}
WRITTEN = {
    "continue": "# mine\nname: Mine\nversion: 1.0.0\nmodels:\n"
    "  - name: GPT  # old\n    provider: openai\n    model: gpt-4o\n# end\n",
    "claude-code": '{\n  "env": {\n    "FOO": "1"\n  },\n  "model": "opus"\n}\n',
    "opencode": '{\n  // mine\n  "theme": "x",\n  "provider": {"other": {"name": "Other"}},\n}\n',
    "aider": "# mine\ndark-mode: true\nopenai-api-key: sk-users-own # paid\n",
    "zed": '// mine\n{\n  "vim_mode": true, // yes\n}\n',
    "open-webui": "# mine\nWEBUI_NAME='My UI'\n",
}
TOOLS = sorted(FILES)


class Home:
    """A user's home with the folders of every tool, and an endpoint that asks for a key."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.key = KEY
        for name in FILES.values():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)

    def file(self, tool: str) -> Path:
        return self.folder / FILES[tool]

    def write(self, tool: str, text: str | None = None, mode: int = 0o644) -> Path:
        path = self.file(tool)
        path.write_text(WRITTEN[tool] if text is None else text)
        path.chmod(mode)
        return path

    @property
    def environment(self) -> dict[str, str]:
        dropped = ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CONTINUE_GLOBAL_DIR")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**kept, "HOME": str(self.folder), "OPENAI_API_KEY": self.key}

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "appliance.host.inject", *words]

    def run(self, *words: str, most_bytes: int = resource.RLIM_INFINITY) -> tuple[int, str, str]:
        done = subprocess.run(
            self.argv(*words),
            cwd=ROOT,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=180,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert KEY not in done.stdout + done.stderr, "a key is never shown"
        return done.returncode, done.stdout, done.stderr

    def inject(self, tool: str, *words: str, most_bytes: int = resource.RLIM_INFINITY) -> tuple[int, str, str]:
        file = ("--file", str(self.file(tool))) if tool == "open-webui" else ()
        return self.run(tool, "--url", self.url, *file, *words, most_bytes=most_bytes)

    def undo(self, tool: str, *words: str) -> tuple[int, str, str]:
        return self.run(tool, "--undo", "--yes", *words)

    def states(self) -> dict[str, str]:
        code, out, err = self.run("--list", "--json")
        assert code == 0, err
        return {row["tool"]: row["state"] for row in json.loads(out)}

    def snapshot(self) -> dict[str, tuple[bytes, int]]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mode & 0o777) for path in files}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with endpoint("--key", KEY, "--model", "qwen", "--context", "32768") as found:
        yield found


@pytest.fixture
def home(tmp_path: Path, url: str) -> Home:
    return Home(tmp_path / "my home", url)


@pytest.mark.parametrize(("tool", "mode"), [*((tool, 0o644) for tool in TOOLS), ("aider", 0o664), ("zed", 0o600)])
def test_what_was_put_in_is_taken_out_to_the_byte(home: Home, tool: str, mode: int) -> None:
    home.write(tool, mode=mode)
    before = home.snapshot()
    code, out, err = home.inject(tool, "--yes")
    assert code == 0, err
    text = home.file(tool).read_text()
    assert "# mine" in text or "// mine" in text or '"FOO": "1"' in text
    assert "127.0.0.1" in text
    assert "sk-users-own" not in out
    assert home.states()[tool] == "injected"
    code, out, err = home.undo(tool)
    assert code == 0, err
    assert "sk-users-own" not in out
    assert home.snapshot() == before


@pytest.mark.parametrize("tool", TOOLS)
def test_a_file_that_was_not_there_is_not_there_again(home: Home, tool: str) -> None:
    before = home.snapshot()
    assert home.inject(tool, "--yes")[0] == 0
    assert home.file(tool).exists()
    assert home.undo(tool)[0] == 0
    assert home.snapshot() == before


@pytest.mark.parametrize("tool", TOOLS)
def test_twice_changes_nothing_and_says_so(home: Home, tool: str) -> None:
    home.write(tool)
    home.inject(tool, "--yes")
    once = home.snapshot()
    code, out, err = home.inject(tool)
    assert code == 0, err
    assert "is already set up" in out
    assert home.snapshot() == once


@pytest.mark.parametrize("tool", TOOLS)
def test_another_model_takes_the_place_of_the_first(home: Home, tool: str) -> None:
    home.write(tool)
    before = home.snapshot()
    home.inject(tool, "--yes")
    code, _, err = home.inject(tool, "--yes", "--model", "gemma-3")
    assert code == 0, err
    text = home.file(tool).read_text()
    assert tool == "open-webui" or ("gemma-3" in text and "qwen" not in text)
    assert home.undo(tool)[0] == 0
    assert home.snapshot() == before


def test_a_key_that_is_asked_for_no_longer_goes(home: Home) -> None:
    home.write("continue")
    before = home.snapshot()
    home.inject("continue", "--yes")
    secrets = home.folder / ".continue/.env"
    assert secrets.exists()
    with endpoint("--model", "qwen") as url:
        home.url, home.key = url, ""
        code, _, err = home.inject("continue", "--yes")
    assert code == 0, err
    assert not secrets.exists()
    assert "apiKey" not in home.file("continue").read_text()
    assert home.undo("continue")[0] == 0
    assert home.snapshot() == before


def test_an_entry_of_the_model_before_is_not_left_behind(home: Home) -> None:
    """The user has written the new model's entry by hand. The old model's entry is still ours, and goes."""
    path = home.write("continue")
    home.inject("continue", "--yes")
    text = path.read_text()
    entry = text[text.index('  - name: "Appliance') : text.index("# end")]
    path.write_text(text.replace("# end", f"{entry.replace('qwen', 'gemma')}# end"))
    code, _, err = home.inject("continue", "--yes", "--model", "gemma")
    assert code == 0, err
    assert path.read_text() == text.replace("qwen", "gemma")


EDITS = {
    "continue": ("# end\n", "# end\ncontext:\n  - provider: code\n"),
    "claude-code": ('"FOO": "1"', '"FOO": "2"'),
    "opencode": ('"theme": "x"', '"theme": "y"'),
    "aider": ("dark-mode: true", "dark-mode: false"),
    "zed": ('"vim_mode": true', '"vim_mode": false'),
    "open-webui": ("My UI", "Our UI"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_what_the_user_wrote_since_stays_when_it_is_taken_out(home: Home, tool: str) -> None:
    home.write(tool)
    home.inject(tool, "--yes")
    old, new = EDITS[tool]
    path = home.file(tool)
    path.write_text(path.read_text().replace(old, new))
    assert home.states()[tool] == "injected, file edited since"
    code, _, err = home.undo(tool)
    assert code == 0, err
    assert path.read_text() == WRITTEN[tool].replace(old, new)
    assert not list(home.folder.rglob("*.appliance-backup*"))


def test_a_second_injection_forgets_no_edit_of_the_user(home: Home) -> None:
    path = home.write("zed")
    home.inject("zed", "--yes")
    path.write_text(path.read_text().replace('"vim_mode": true', '"vim_mode": false'))
    home.inject("zed", "--yes", "--model", "gemma")
    assert home.undo("zed")[0] == 0
    assert path.read_text() == WRITTEN["zed"].replace("true", "false")


@pytest.mark.parametrize(
    ("tool", "old", "new"),
    [
        ("zed", '"max_tokens": 32768', '"max_tokens": 16384'),
        ("claude-code", '"ANTHROPIC_MODEL": "qwen"', '"ANTHROPIC_MODEL": "opus"'),
        ("aider", "openai/qwen", "openai/mine"),
        ("continue", "    model: qwen", "    model: mine"),
    ],
)
def test_what_the_user_made_of_ours_is_left_alone(home: Home, tool: str, old: str, new: str) -> None:
    path = home.write(tool)
    home.inject(tool, "--yes")
    path.write_text(path.read_text().replace(old, new))
    assert new in path.read_text()
    before = home.snapshot()
    code, _, err = home.undo(tool)
    assert code == 10
    assert "the injected values were edited by hand" in err
    assert f"{path}.appliance-backup" in err
    assert any(line.startswith("  | -") and new.split()[-1] in line for line in err.splitlines()), "the difference"
    assert "sk-users-own" not in err
    assert home.states()[tool] == "changed by you"
    assert home.snapshot() == before
    assert home.run(tool, "--forget")[0] == 0
    assert home.states()[tool] == "not injected"
    assert path.read_text() == before[str(path)][0].decode()


@pytest.mark.parametrize(
    ("tool", "text", "said"),
    [
        ("claude-code", '{\n  "env": {\n    "A": 1,,\n  }\n}\n', "line 3: a key in double quotes is missing"),
        ("zed", "// settings\n[]\n", "line 2: it is not an object"),
        ("opencode", '{"provider": []}', "provider is not a group of settings"),
        ("continue", "models:\n  - name: x\n bad", "line 3: "),
        ("continue", "models: [{name: x}]\n", "models is not a list with one entry per line"),
        ("aider", "- a\n", "it is not a mapping"),
        ("open-webui", "what is this\n", "line 1: not NAME=value"),
    ],
)
def test_a_file_that_is_not_valid_is_never_overwritten(home: Home, tool: str, text: str, said: str) -> None:
    path = home.write(tool, text)
    before = home.snapshot()
    code, _, err = home.inject(tool, "--yes")
    assert code == 10
    assert said in err
    assert str(path) in err
    assert home.snapshot() == before


def test_what_is_not_utf8_or_no_file_is_never_overwritten(home: Home) -> None:
    home.file("zed").write_bytes(b'{"a": "\xff"}')
    home.file("aider").mkdir()
    for tool, said in (("zed", "not UTF-8"), ("aider", "not a settings file")):
        code, _, err = home.inject(tool, "--yes")
        assert code == 10
        assert said in err
    assert home.file("zed").read_bytes() == b'{"a": "\xff"}'


def test_an_older_config_is_not_hidden_by_a_new_one(home: Home) -> None:
    (home.folder / ".continue/config.json").write_text("{}")
    code, _, err = home.inject("continue", "--yes")
    assert code == 10
    assert "a new config.yaml would hide" in err
    assert home.states()["continue"] == "unreadable"


def test_a_tool_that_is_not_there_is_told(home: Home) -> None:
    (home.folder / ".config/zed").rmdir()
    code, _, err = home.inject("zed", "--yes")
    assert code == 10
    assert "does not seem to be installed: no folder" in err
    assert home.inject("zed", "--yes", "--create")[0] == 0
    assert home.file("zed").exists()


def test_of_a_link_the_target_is_written_and_the_link_stays(home: Home) -> None:
    real = home.folder / "dotfiles/zed.json"
    real.parent.mkdir()
    real.write_text(WRITTEN["zed"])
    home.file("zed").symlink_to(real)
    assert home.inject("zed", "--yes")[0] == 0
    assert home.file("zed").is_symlink()
    assert "appliance" in real.read_text()
    assert [path.name for path in real.parent.iterdir()] == ["zed.json"]
    assert home.undo("zed")[0] == 0
    assert home.file("zed").is_symlink()
    assert real.read_text() == WRITTEN["zed"]


def test_line_ends_of_windows_stay(home: Home) -> None:
    path = home.file("zed")
    path.write_bytes(WRITTEN["zed"].replace("\n", "\r\n").encode())
    assert home.inject("zed", "--yes")[0] == 0
    data = path.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n") > 10


@pytest.mark.parametrize("tool", ["aider", "open-webui"])
def test_a_file_that_holds_the_key_is_its_users_alone(home: Home, tool: str) -> None:
    path = home.write(tool, mode=0o644)
    code, out, _ = home.inject(tool, "--yes")
    assert code == 0
    assert KEY in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "644 becomes 600" in out


def test_the_key_lies_in_one_file_and_goes_with_the_last_tool_that_reads_it(home: Home) -> None:
    key = home.folder / ".config/appliance/api_key"
    home.inject("opencode", "--yes")
    home.inject("claude-code", "--yes")
    assert (key.read_text(), key.stat().st_mode & 0o777) == (f"{KEY}\n", 0o600)
    helper = json.loads(home.file("claude-code").read_text())["apiKeyHelper"]
    assert subprocess.run(helper, shell=True, capture_output=True, check=True).stdout.decode() == f"{KEY}\n"
    home.undo("opencode")
    assert key.exists()
    home.undo("claude-code")
    assert not key.exists()


def test_a_record_of_another_tool_that_is_damaged_keeps_the_key(home: Home) -> None:
    home.inject("opencode", "--yes")
    home.inject("zed", "--yes")
    (home.folder / ".config/appliance/injected/opencode.json").write_text("{")
    assert home.undo("zed")[0] == 0
    assert (home.folder / ".config/appliance/api_key").exists()


def test_a_key_file_of_the_users_is_referred_to_and_not_copied(home: Home) -> None:
    own = home.folder / "my key"
    own.write_text(f"{KEY}\n")
    assert home.inject("opencode", "--yes", "--key-file", str(own))[0] == 0
    assert f"{{file:{own}}}" in home.file("opencode").read_text()
    assert not (home.folder / ".config/appliance/api_key").exists()


def test_nobody_to_ask_writes_nothing(home: Home) -> None:
    home.write("zed")
    before = home.snapshot()
    code, out, err = home.inject("zed")
    assert code == 2
    assert '+  "language_models"' in out
    assert "there is no terminal to ask on" in err
    assert home.inject("zed", "--dry-run")[0] == 0
    assert home.snapshot() == before


def asked(home: Home, answer: str, meanwhile: str | None = None) -> tuple[int, str]:
    """Run inject at a terminal and answer its question. `meanwhile` is written to the file before the answer."""
    ours, theirs = pty.openpty()
    argv = home.argv("zed", "--url", home.url)
    with subprocess.Popen(
        argv, cwd=ROOT, env=home.environment, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as program:
        assert program.stdout
        said = b""
        while not said.endswith(b"[y/N] "):
            data = program.stdout.read(1)
            assert data, said.decode()
            said += data
        if meanwhile is not None:
            home.file("zed").write_text(meanwhile)
        os.write(ours, answer.encode())
        said += program.stdout.read()
    os.close(ours)
    os.close(theirs)
    return program.returncode, said.decode()


def test_it_asks(home: Home) -> None:
    path = home.write("zed")
    assert asked(home, "n\n")[0] == 0
    assert path.read_text() == WRITTEN["zed"]
    assert asked(home, "y\n")[0] == 0
    assert "appliance" in path.read_text()


def test_a_file_that_changed_while_it_asked_is_left_alone(home: Home) -> None:
    path = home.write("zed")
    code, said = asked(home, "y\n", meanwhile='{"saved": "meanwhile"}')
    assert code == 10
    assert "was changed meanwhile" in said
    assert path.read_text() == '{"saved": "meanwhile"}'
    assert not list(home.folder.rglob("*.appliance-backup*"))


def test_what_was_written_is_as_it_was_when_the_rest_cannot_be(home: Home) -> None:
    """Continue's two files are small enough to write. The record comes last, and exceeds the limit on a file's size."""
    home.write("continue")
    before = home.snapshot()
    code, _, err = home.inject("continue", "--yes", most_bytes=700)
    assert code == 10
    assert "cannot be written" in err
    assert home.snapshot() == before


def test_a_backup_that_is_there_already_is_kept(home: Home) -> None:
    path = home.write("zed")
    older = path.with_name("settings.json.appliance-backup")
    older.write_text("older")
    home.inject("zed", "--yes")
    assert older.read_text() == "older"
    assert home.undo("zed")[0] == 0
    assert older.read_text() == "older"
    assert path.read_text() == WRITTEN["zed"]


def test_a_backup_that_is_gone_is_told(home: Home) -> None:
    path = home.write("zed")
    home.inject("zed", "--yes")
    path.with_name("settings.json.appliance-backup").unlink()
    code, _, err = home.undo("zed")
    assert code == 10
    assert "the backup cannot be read" in err
    assert "appliance" in path.read_text()


def test_a_record_that_is_damaged_is_told(home: Home) -> None:
    home.write("zed")
    home.inject("zed", "--yes")
    (home.folder / ".config/appliance/injected/zed.json").write_text("{")
    assert home.undo("zed")[0] == 10
    assert home.states()["zed"] == "unreadable"
    assert home.run("zed", "--forget")[0] == 0


def test_a_tool_that_was_removed_can_be_undone(home: Home) -> None:
    home.inject("zed", "--yes")
    home.file("zed").unlink()
    assert home.states()["zed"] == "file is gone"
    code, out, _ = home.undo("zed")
    assert code == 0
    assert "nothing is left to remove" in out


@pytest.mark.parametrize("tool", ["cursor", "page-assist", "open-webui"])
def test_what_no_file_configures_gets_steps(home: Home, tool: str) -> None:
    before = home.snapshot()
    code, out, err = home.run(tool, "--url", home.url)
    assert code == 0, err
    assert home.url in out
    assert home.snapshot() == before


def test_the_list_shows_them_all(home: Home) -> None:
    home.inject("aider", "--yes")
    code, out, _ = home.run("--list")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "injected" in rows["aider"]
    assert str(home.file("aider")) in rows["aider"]
    assert "by hand" in rows["cursor"]
    assert "not injected" in rows["zed"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("zedd",), 2, "perhaps you meant 'zed'"),
        ((), 2, "no tool was named"),
        (("zed", "--undo"), 10, "the appliance is not in the settings of Zed"),
        (("zed", "--url", "http://127.0.0.1:1"), 10, "no answer from http://127.0.0.1:1/v1"),
    ],
)
def test_what_cannot_be_is_told(home: Home, words: tuple[str, ...], code: int, said: str) -> None:
    found = home.run(*words)
    assert found[0] == code
    assert said in found[2]


def test_another_file_of_the_same_tool_is_not_mixed_with_the_first(home: Home) -> None:
    home.inject("zed", "--yes")
    code, _, err = home.inject("zed", "--yes", "--file", str(home.folder / "other.json"))
    assert code == 10
    assert f"in another file: {home.file('zed')}" in err


def test_with_url_and_model_nothing_has_to_run(home: Home) -> None:
    home.url = "http://127.0.0.1:1/v1"
    code, _, err = home.inject("zed", "--yes", "--model", "qwen")
    assert code == 0, err
    assert "context length unknown" in err
    assert '"max_tokens": 8192' in home.file("zed").read_text()
