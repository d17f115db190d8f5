"""The programs that the build half starts; the engine itself is met by the container tests."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from images import docker
from images.choice import smi
from images.errors import BuildError, MatrixError


def test_stages_that_the_builder_had_done_are_told(tmp_path: Path) -> None:
    """CACHED stands on a line of its own and is matched by the step's number. A cached COPY does not make its stage a
    kept one."""
    said = ["#6 [compile 2/4] COPY a b", "#6 CACHED", "#7 [compile 3/4] RUN w", "#7 DONE 2.0s"]
    said += ["#8 [linux/amd64 compile-cuda 1/2] RUN x", "#8 CACHED", "#9 [source 2/2] RUN y", "#9 CACHED", "#10 CACHED"]
    said += ["#11 [compile-cuda 2/2] RUN z", "#11 CACHED"]
    done = docker.stream(("printf", r"%s\n", *said), cwd=tmp_path)
    assert done.kept_stages == ("compile-cuda", "source")


def test_what_a_program_says_is_copied_to_stderr_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = docker.stream((sys.executable, "-u", "-c", script), cwd=tmp_path)
    assert done == docker.Finished(code=3, lines=("out", "err"))
    seen = capfd.readouterr()
    assert (seen.out, seen.err) == ("", "out\nerr\n")


def test_only_the_last_lines_are_kept(tmp_path: Path) -> None:
    done = docker.stream((sys.executable, "-c", "for n in range(1000): print(n)"), cwd=tmp_path)
    assert (len(done.lines), done.lines[-1]) == (docker.KEPT_LINES, "999")


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="program cannot be started: no-such-program: No such file or directory"):
        docker.stream(("no-such-program",), cwd=tmp_path)
    assert docker.capture(("no-such-program",), cwd=tmp_path).code == 127


def test_a_program_that_cannot_be_started_is_not_one_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tool").touch(mode=0o644)
    assert docker.capture((str(tmp_path / "tool"),), cwd=tmp_path).code == 126
    assert docker.capture((str(tmp_path / "none"),), cwd=tmp_path).code == 127


@pytest.mark.thorough
def test_a_program_that_hangs_is_given_up_and_gone_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nsleep 1000 & echo $$ $! > pids; wait\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = docker.capture((str(tmp_path / "nvidia-smi"),), cwd=tmp_path, timeout_s=0.5)
    assert done == docker.Finished(code=docker.TIMED_OUT, lines=(f"{tmp_path}/nvidia-smi: no answer in 0.5 s",))
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])
    with pytest.raises(MatrixError, match=r"nvidia-smi failed with exit 124: .*nvidia-smi: no answer in 0\.5 s"):
        smi.parse(done, "linux/amd64")


@pytest.mark.thorough
def test_an_engine_that_hangs_is_given_up_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "docker.sock"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        with pytest.raises(BuildError, match=r"the Docker engine does not answer: .*timed out") as caught:
            docker.Engine(quick_timeout_s=1).image("x")
    assert caught.value.exit_code == 60


def test_a_line_that_is_no_text_ends_no_build(tmp_path: Path) -> None:
    done = docker.stream(("printf", r"\303\n"), cwd=tmp_path)
    assert (done.code, done.lines) == (0, ("\ufffd",))
