"""Records the host command's whole life in a terminal, as text: docs/host-session.txt.

Each command runs on a pseudo-terminal of its own with a real container of the image, on a volume and in a home that
are made for it and removed. Lines that a terminal would have overwritten are kept, once each; the key and the folders
are replaced.

    python3 -m benchmarks.host_session [--image IMAGE] [--out docs/host-session.txt]
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs/host-session.txt"
NEXT = "appliance:next"
MODEL = ROOT / ".make/models/SmolLM2-135M-Instruct.Q4_1.gguf"
VOLUME = "appliance-session"
LIMIT_S = 300.0
COLUMNS = 120
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FRAME = re.compile(r"(\r\n|\r|\n|\x1b\[2K|\x1b\[1A)")
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏ 0:"  # and a clock that has just begun
CHANGING = re.compile(r"[0-9.:]+|[━╸╺ ]{2,}|[⠁-⣿]")  # of a line that is drawn again and again


@dataclass(frozen=True)
class Say:
    """Once `after` was shown: type `text`, or send Ctrl-C where it is None."""

    after: str
    text: str | None


@dataclass(frozen=True)
class Step:
    why: str
    words: str
    says: tuple[Say, ...] = ()


def _steps(image: str | None) -> tuple[Step, ...]:
    model, own = (
        ".make/models/SmolLM2-135M-Instruct.Q4_1.gguf",
        f"--volume {VOLUME}{f' --image {image}' if image else ''}",
    )
    return (
        Step("What would be started:", f"run {model} --name demo {own} --dry-run"),
        Step("Start it; measuring before serving, so that there is a speed to compare later:",
             f"run {model} --name demo {own} --detach --set tune=first --set budget_s=10"),
        Step("", "list"),
        Step("", "status"),
        Step("", "chat demo --max-tokens 40 --temperature 0",
             (Say(">>> ", "In one sentence: what is a lighthouse for?"), Say(">>> ", "/what"), Say(">>> ", "/exit"))),
        Step("", "logs demo --tail 4"),
        Step("What the machine gives, of this endpoint or of any other:",
             "bench --name demo --prompts 1K --concurrency 1,2 --tokens 32 --requests 1"),
        Step("Into an editor's settings and out again:", "inject zed --name demo --create",
             (Say("[y/N] ", "y"),)),
        Step("", "inject zed --undo", (Say("[y/N] ", "y"),)),
        Step("", "version"),
        Step("A second one beside it, in the foreground, until Ctrl-C:", f"run {model} --name second {own} --fast",
             (Say("the model is ready", None), Say("stop second?", "y"))),
        Step("What is refused, in words:", f"run {model} --name demo {own} --detach"),
        Step("", f"run {model} --name other {own} --detach --port 11435"),
        Step("", f"run .make/models/SmolLM2-135M.gguf {own}"),
        Step("", f"run https://me:secret@example.org/model.gguf {own}"),
        Step("", f"run ./LICENSE --name other {own} --detach"),
        Step("", f"run {model} --name other {own} --gpus all"),
        Step("", "statsu"),
        Step("A newer image (here the same one under another version), and back:", f"upgrade demo --image {NEXT}"),
        Step("", "list"),
        Step("", "upgrade demo --back"),
        Step("", "stop demo"),
        Step("", "list"),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", help="which image; the one for this machine without it")
    parser.add_argument("--out", type=Path, default=OUT, help="where to")
    options = parser.parse_args()
    _docker("volume", "create", VOLUME)
    try:
        with TemporaryDirectory() as home:
            lines = [line for step in _steps(options.image) for line in _recorded(step, home)]
            text = _neutral("\n".join(lines), home)
    finally:
        for name in ("appliance-demo", "appliance-demo-before", "appliance-second", "appliance-other"):
            subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)
        subprocess.run(["docker", "image", "rm", NEXT], capture_output=True, check=False)
        _docker("volume", "rm", VOLUME)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(options.out)
    return 0


def _docker(*words: str) -> None:
    subprocess.run(["docker", *words], check=True, capture_output=True)


def _recorded(step: Step, home: str) -> list[str]:
    print(f"$ appliance {step.words}", file=sys.stderr)
    if f"--image {NEXT}" in step.words:
        _docker("commit", "--change", "LABEL org.opencontainers.image.version=0.1.1", "appliance-demo", NEXT)
    text, code = _on_terminal((sys.executable, "-m", "appliance", *shlex.split(step.words)), step.says, home)
    head = [f"# {step.why}"] if step.why else []
    tail = [f"[exit code {code}]"] if code else []
    return [*head, f"$ appliance {step.words}", *_frames(text), *tail, ""]


def _on_terminal(argv: Sequence[str], says: Sequence[Say], home: str) -> tuple[str, int]:
    docker = os.environ.get("DOCKER_CONFIG", str(Path.home() / ".docker"))
    places = {"HOME": home, "XDG_CONFIG_HOME": f"{home}/.config", "DOCKER_CONFIG": docker}
    terminal_is = {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(argv[0], list(argv), {**os.environ, **terminal_is, **places})
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    shown, seen, left = "", 0, list(says)
    deadline = time.monotonic() + LIMIT_S
    while True:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            sys.exit(f"nothing is recorded: `{' '.join(argv)}` did not end within {LIMIT_S:g} s; is this machine busy?")
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:  # how a pseudo-terminal tells that the program has ended
            break
        if not data:
            break
        shown += data.decode("utf-8", "replace")
        if left and left[0].after in shown[seen:]:
            say, seen = left.pop(0), len(shown)
            time.sleep(0.5)
            os.write(terminal, b"\x03" if say.text is None else f"{say.text}\n".encode())
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _frames(text: str) -> list[str]:
    """Lines in the order in which they were seen; of one that was drawn again and again the first of each kind."""
    kept: list[str] = []
    drawn: list[str] = []
    parts = FRAME.split(text)
    for frame, end in zip(parts[::2], [*parts[1::2], "\r\n"], strict=True):
        line = ANSI.sub("", frame).rstrip()
        kind = CHANGING.sub("#", line)
        if not line.strip() or not line.strip(SPINNER) or kind in drawn:
            continue
        kept.append(line)
        drawn = [*drawn, kind] if end != "\r\n" else []
    return kept


def _neutral(text: str, home: str) -> str:
    text = text.replace(home, "/home/me")
    text = re.sub(r"sk-[\w-]{20,}", "sk-…", text)
    text = text.replace(str(MODEL.resolve().parent), "/home/me/appliance/.make/models")
    return text.replace(str(ROOT), "/home/me/appliance")


if __name__ == "__main__":
    sys.exit(main())
