"""Which test reaches which function, as `make mutants` looks it up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import reach

SOURCE = '''"""A module."""

from __future__ import annotations

LIMIT = 4


class Thing:
    @property
    def size(self) -> int:
        """Return it."""
        if LIMIT:
            return 1
        return 2


def outer() -> int:
    def inner() -> int:
        return 3

    return inner()


def short() -> int: return 5
'''


B = """from appliance.a import outer


def f() -> int:
    return outer()
"""


@pytest.fixture
def planted(tmp_path: Path) -> list[reach.Function]:
    for name, text in (("appliance/a.py", SOURCE), ("images/b.py", B)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return reach.plant(tmp_path, tmp_path / "seen")


def number_of(planted: list[reach.Function], file: str, line: int) -> int:
    return next(at for at, each in enumerate(planted) if (each.file, each.first) == (file, line))


def test_a_planted_tree_does_what_it_did(tmp_path: Path, planted: list[reach.Function]) -> None:
    seen: list[int] = []
    text = (tmp_path / "appliance/a.py").read_text().replace(reach.IMPORT, "")
    names: dict[str, object] = {"_reached": seen.append}
    exec(compile(text, "a.py", "exec"), names)
    made, outer, short = names["Thing"], names["outer"], names["short"]
    assert callable(made) and callable(outer) and callable(short)  # noqa: PT018 - for mypy
    assert (made().size, outer(), short()) == (1, 3, 5)
    at = [number_of(planted, "appliance/a.py", line) for line in (9, 17, 18)]
    assert seen == at
    assert reach.IMPORT in (tmp_path / "images/b.py").read_text()
    assert (tmp_path / "appliance/_probe.py").read_text().count(str(tmp_path / "seen")) == 1


def test_tests_of_a_line_are_those_of_the_innermost_function(tmp_path: Path, planted: list[reach.Function]) -> None:
    size, outer, inner = (number_of(planted, "appliance/a.py", line) for line in (9, 17, 18))
    (tmp_path / "seen/1.seen").write_text(f"t::a\ts 0.5,{size},{outer}\nt::b\ts 2.0,{inner}\nt::failed\t{inner}\n")
    (tmp_path / "seen/2.seen").write_text(f"t::a\t{inner}\n")  # of a process that t::a started
    found = reach.read(tmp_path / "seen")
    assert found.seconds == {"t::a": 0.5, "t::b": 2.0}
    assert found.tests_of("appliance/a.py", 12) == {"t::a"}
    assert found.tests_of("appliance/a.py", 19) == {"t::a", "t::b"}
    assert found.tests_of("appliance/a.py", 5) == {"t::a", "t::b"}  # outside of functions: all of the file
    assert found.tests_of("images/b.py", 5) == set()
    f = number_of(planted, "images/b.py", 4)
    (tmp_path / "seen/3.seen").write_text(f"t::c\ts 0.1,{f}\nt::c\t{f},\n")  # the last line was cut
    found = reach.read(tmp_path / "seen")
    assert found.tests_of("appliance/a.py", 5) == {"t::a", "t::b", "t::c"}  # and of one that imports it
    assert found.tests_of("appliance/a.py", 12) == {"t::a"}
