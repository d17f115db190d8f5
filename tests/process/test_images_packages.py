"""Which archive a build takes: asked once and not for long, and what follows from each answer."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from images.build import build, installed, mirror, packages, snapshot
from images.build.mirror import Mirror
from images.build.packages import Archives
from images.errors import ArchiveError, BuildError
from images.matrix import matrix
from images.matrix.matrix import Cell
from images.pins import debian

TIMESTAMP = "20260718T060000Z"
PATIENCE_S = 90.0  # beside other work even an answer that is there at once takes its time
Answer = Callable[[BaseHTTPRequestHandler], None]


def signed(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(snapshot.SIGNED + b"\nHash: SHA256\n")


def of_an_earlier_import(handler: BaseHTTPRequestHandler) -> None:
    """Redirect to an earlier import, as the service does for a moment at which it took no snapshot."""
    if "20260718T023111Z" in handler.path:
        return signed(handler)
    handler.send_response(302)
    handler.send_header("Location", handler.path.replace(TIMESTAMP, "20260718T023111Z"))
    handler.send_header("Content-Length", "0")
    return handler.end_headers()


def missing(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(404)
    handler.end_headers()


def crowded(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(429)
    handler.end_headers()


def portal(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"<html>please log in to this wireless network</html>")


class Service:
    def __init__(self, root: str) -> None:
        self.root = root
        self.asked: list[str] = []
        self.is_over = threading.Event()


@contextmanager
def serving(answer: Answer | None) -> Iterator[Service]:
    """Serve `answer`. With None the service accepts connections and never answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            service.asked.append(self.path)
            if answer:
                answer(self)
            else:
                service.is_over.wait()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: `asked` keeps the paths."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = Service(f"http://127.0.0.1:{server.server_port}/archive")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield service
    finally:
        service.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def project() -> Path:
    return Path(__file__).parents[2]


@pytest.fixture
def cell(project: Path) -> Cell:
    return matrix.select(matrix.load(project).cells, "llama-cpu")[0]


@pytest.mark.parametrize("answer", [signed, of_an_earlier_import])
def test_a_snapshot_that_answers_is_taken_at_the_moment_of_the_lock(cell: Cell, answer: Answer) -> None:
    with serving(answer) as service:
        archives = Archives(service.root, timeout_s=PATIENCE_S)
        assert archives.choose(cell.base, TIMESTAMP) == Mirror(root=service.root, timestamp=TIMESTAMP)
    assert service.asked[0] == f"/archive/debian/{TIMESTAMP}/dists/bookworm/InRelease"
    assert archives.trouble is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [(missing, "it answers 404"), (crowded, "it answers 429"), (portal, "something else than a signed list")],
)
def test_a_snapshot_that_is_none_is_not_taken(cell: Cell, answer: Answer, why: str) -> None:
    with serving(answer) as service:
        archives = Archives(service.root, timeout_s=PATIENCE_S)
        assert archives.choose(cell.base, TIMESTAMP) is None
    assert f"{service.root}/debian/{TIMESTAMP}/dists/bookworm/InRelease: " in archives.reason
    assert why in archives.reason
    assert "\n" not in archives.reason


def test_a_service_that_says_nothing_is_waited_for_once_and_not_for_long(cell: Cell) -> None:
    """The time limit is the command's own. It covers name resolution and connecting as well."""
    with serving(None) as service:
        archives = Archives(service.root, timeout_s=snapshot.TIMEOUT_S)
        begin_s = time.monotonic()
        assert [archives.choose(cell.base, TIMESTAMP) for _ in range(3)] == [None, None, None]
        taken_s = time.monotonic() - begin_s
    assert len(service.asked) == 1
    assert snapshot.TIMEOUT_S <= 3
    assert taken_s < 20 * snapshot.TIMEOUT_S
    assert "no answer within 3 s" in archives.reason


@pytest.mark.parametrize(
    ("root", "why"), [("http://127.0.0.1:9", "no connection"), ("http://a.invalid", "its name is not known here")]
)
def test_a_service_that_is_not_there_is_told_in_a_few_words(cell: Cell, root: str, why: str) -> None:
    archives = Archives(root, timeout_s=PATIENCE_S)
    assert archives.choose(cell.base, TIMESTAMP) is None
    assert archives.reason.endswith(f"InRelease: {why})")


def test_nothing_is_published_of_the_newest_packages(cell: Cell) -> None:
    archives = Archives("http://127.0.0.1:9", is_strict=True)
    for _ in range(2):
        with pytest.raises(BuildError, match="no snapshot of Debian's archive can be reached") as caught:
            archives.choose(cell.base, TIMESTAMP)
        assert (caught.value.exit_code, "without --locked" in (caught.value.hint or "")) == (60, True)
    assert not archives.gave_up(ArchiveError("x"))


@pytest.mark.parametrize("text", ["http://h", f"http://h@{TIMESTAMP}"])
def test_what_the_user_names_is_taken_and_not_asked(cell: Cell, text: str) -> None:
    given = mirror.parse_mirror(text)
    archives = Archives("http://127.0.0.1:9", given=given)
    assert archives.choose(cell.base, TIMESTAMP) == given
    assert archives.trouble is None
    assert not archives.gave_up(ArchiveError("x"))


def test_a_snapshot_that_fails_in_the_middle_is_given_up_for_the_whole_command(cell: Cell) -> None:
    with serving(signed) as service:
        archives = Archives(service.root, timeout_s=PATIENCE_S)
        assert archives.choose(cell.base, TIMESTAMP)
        assert archives.gave_up(ArchiveError("429  Too Many Requests"))
        assert archives.choose(cell.base, TIMESTAMP) is None
    assert len(service.asked) == 1
    assert "429  Too Many Requests" in archives.reason


@pytest.mark.parametrize("tried", [None, Mirror(root="http://near"), Mirror(root="http://h", timestamp=TIMESTAMP)])
def test_every_hint_can_be_followed_as_it_stands(project: Path, cell: Cell, tried: Mirror | None) -> None:
    """The option that a hint names accepts the hint's value, which is not the one that just failed."""
    lock = debian.load(project, cell.base, "linux/amd64")
    assert lock
    hint = Archives(matrix.load(project).snapshot).hint(lock, tried)
    assert debian.LOCK_COMMAND in hint
    named = re.findall(r"--debian-mirror (\S+)", hint)
    assert [str(mirror.parse_mirror(each)) for each in named] == named
    assert named == ([] if tried and tried.timestamp else [f"http://snapshot.debian.org/archive@{lock.snapshot}"])


def test_the_state_that_is_locked_has_settled() -> None:
    assert snapshot.settled(datetime(2026, 7, 18, 3, 4, 5, tzinfo=UTC)) == "20260717T210405Z"


def test_a_temporary_lock_is_kept_by_its_build(project: Path, cell: Cell, tmp_path: Path) -> None:
    job = build.plan_job(project, cell, build.Options(), build.BaseChoice(identity="sha256:1"), platform="linux/amd64")
    assert job.lock
    (tmp_path / build.ARCHIVES).mkdir(parents=True)
    packages.save(tmp_path, replace(job, build_id="f" * 32, is_locked=False))
    assert packages.load(tmp_path, "f" * 32) == job.lock
    assert packages.load(tmp_path, "e" * 32) is None
    assert installed.name_of(replace(job, is_locked=False)) == f"the temporary lock of {job.lock.archive_date}"
    assert installed.name_of(job) == "images/locks/debian-bookworm-slim-amd64.json"
