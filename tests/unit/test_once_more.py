"""The few tests that failed beside others run once more, alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import once_more

# Each test fails as often as its file says, and counts down.
TESTS = """
from pathlib import Path
import pytest

def is_over(name):
    left = Path(__file__).parent / name
    times = int(left.read_text())
    left.write_text(str(times - 1))
    return times <= 0

@pytest.mark.parametrize("name", {names})
def test_it(name):
    assert is_over(name)
"""
# All share what one fixture makes.
SHARED = (
    TESTS
    + """
@pytest.fixture(scope="module")
def shared():
    assert is_over("late")

@pytest.mark.parametrize("number", range({many}))
def test_with_it(shared, number):
    pass
"""
)
pytestmark = pytest.mark.thorough


def stage(folder: Path, monkeypatch: pytest.MonkeyPatch, **failures: int) -> int:
    """Return the exit code of a stage whose tests fail so often."""
    for name, times in failures.items():
        (folder / name).write_text(str(times))
    (folder / "test_some.py").write_text(TESTS.format(names=list(failures)))
    (folder / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(folder)
    return once_more.main("process", ["-q", "-n", "2", "test_some.py"], folder / ".make")


def runs(folder: Path, name: str, before: int) -> int:
    return before - int((folder / name).read_text())


def test_a_test_that_passes_alone_is_named_and_the_stage_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert stage(tmp_path, monkeypatch, steady=0, unsteady=1) == 0
    assert (tmp_path / ".make/unsteady.txt").read_text() == "test_some.py::test_it[unsteady]\n"
    assert (
        "::warning::unsteady: failed beside other tests, passed alone: test_some.py::test_it[unsteady]"
        in capfd.readouterr().out
    )
    assert runs(tmp_path, "steady", 0) == 1
    assert (tmp_path / ".make/junit/process-alone.xml").exists()


def test_it_fails_where_unsteady_tests_have_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSTEADY", "fail")
    assert stage(tmp_path, monkeypatch, unsteady=1) == 1


def test_a_test_that_fails_twice_fails_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage(tmp_path, monkeypatch, steady=0, broken=9) == 1
    assert runs(tmp_path, "broken", 9) == 2
    assert not (tmp_path / ".make/unsteady.txt").exists()


def test_failures_in_many_files_are_no_lack_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    files = [f"test_{number}.py" for number in range(once_more.MOST + 1)]
    for name in files:
        (tmp_path / f"t{name}").write_text("1")
        (tmp_path / name).write_text(TESTS.format(names=[f"t{name}"]))
    monkeypatch.chdir(tmp_path)
    assert once_more.main("process", ["-q", *files], tmp_path / ".make") == 1
    assert runs(tmp_path, "ttest_0.py", 1) == 1


def test_the_tests_of_what_came_too_late_are_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "late").write_text("1")
    many = once_more.MOST + 2
    (tmp_path / "test_shared.py").write_text(SHARED.format(names=[], many=many))
    monkeypatch.chdir(tmp_path)
    assert once_more.main("container", ["-q", "test_shared.py"], tmp_path / ".make") == 0
    assert len((tmp_path / ".make/unsteady.txt").read_text().splitlines()) == many


def test_nothing_to_run_is_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert once_more.main("process", ["no_such_folder"], tmp_path / ".make") == 4
