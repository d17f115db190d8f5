from __future__ import annotations

from pathlib import Path

import pytest

from appliance.abilities import Abilities, Ability, Result, digest_of
from appliance.abilities.kept import KeptAbilities
from appliance.errors import VolumeError

ROW = Ability(name="tool_free", whole=Result.PASSED, streamed=Result.FAILED, reason="streamed: why", then="do this")
FOUND = Abilities(of="a", rows=(ROW, Ability(name="structured", whole=Result.PASSED, streamed=Result.PASSED)))


def test_results_are_kept_for_what_they_depend_on(tmp_path: Path) -> None:
    kept = KeptAbilities(tmp_path, "id", pytest.fail)
    assert kept.load("a") == Abilities(of="a")
    kept.save(FOUND)
    assert kept.load("a") == FOUND
    assert kept.load("b") == Abilities(of="b")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"of": "a", "rows": [{"name": "x"}]}', b"\xff"])
def test_a_damaged_file_counts_as_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "id.abilities").write_bytes(data)
    said: list[str] = []
    kept = KeptAbilities(tmp_path, "id", said.append)
    assert kept.load("a") == Abilities(of="a")
    assert "cannot be read, not used" in said[0]
    kept.save(FOUND)
    assert kept.load("a") == FOUND


def test_a_volume_that_refuses(tmp_path: Path) -> None:
    with pytest.raises(VolumeError):
        KeptAbilities(tmp_path / "nowhere", "id", pytest.fail).save(FOUND)


def test_words() -> None:
    assert FOUND.by_name() == {"tool_free": "failed", "structured": "passed"}
    assert FOUND.describe() == "1 passed, 1 failed: tool_free"
    assert [*FOUND.lines()][1:] == ["  tool_free: passed, failed when streamed (streamed: why); do this"]
    assert FOUND.as_document()["rows"][0]["result"] == "failed"


def test_the_digest_tells_templates_and_engines_apart() -> None:
    assert len({digest_of("1", "template"), digest_of("1", None), digest_of("2", "template")}) == 3
    assert digest_of("1", ("a",)) == digest_of("1", ["a"])
