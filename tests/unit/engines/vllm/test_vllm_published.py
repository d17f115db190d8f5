"""docs/2080ti.md: what it says of plans is of the plans, and its tables are held to the command that is started."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from appliance.plan import Plan
from tests.golden import published
from tests.golden.vllm_plans import CASES, arguments, engine_facts, environment, space

PAGE = published.PAGE.read_text("utf-8")
TABLE = PAGE.partition("| | 2 cards |")[2].partition("\n\n")[0]
COLUMNS = (
    "2x2080ti-22g_qwen3.6-27b-awq", "2x2080ti-22g_as-published", "4x2080ti-22g_qwen3.6-27b-awq",
    "4x2080ti-22g_as-published",
)  # fmt: skip


def plan(name: str) -> Plan:
    return space(next(case for case in CASES if case.id == name)).predicted


def cell(row: str, column: int) -> str:
    line = next(line for line in TABLE.splitlines() if line.startswith(f"| {row}"))
    return line.split("|")[2 + column].strip()


def test_the_tables_are_made_of_the_data() -> None:
    """`python -m tests.golden.published` writes them."""
    assert published.page(PAGE) == PAGE


@pytest.mark.parametrize("name", COLUMNS)
def test_the_table_of_plans_is_of_the_plans(name: str) -> None:
    found, column = plan(name), COLUMNS.index(name)
    told = {choice.name: choice.reason for choice in found.choices}
    assert cell("context", column) == f"{found.context:,}"
    assert cell("requests", column).startswith(f"{found.parallel}, ")
    assert found.speed is not None
    assert found.speed.describe().startswith(cell("decode, tok/s, without", column).replace(" (", " tok/s of decode ("))
    with_drafts = cell("decode, tok/s, with them", column).partition(",")[0].replace(" (", " tok/s (")
    assert f"{with_drafts} expected" in told["speculation"]
    (reserve,) = (choice.value for choice in found.choices if choice.name == "reserve")
    assert reserve == f"{cell('free on each card', column)} MiB each"
    further = cell("each further GiB", column)
    assert (f"{further} tokens more" in told["context"]) if further[0].isdigit() else ("native" in told["context"])


@pytest.mark.parametrize("row", published.rows("variables"), ids=lambda row: row.name)
def test_variables_are_set_by_whom_it_says(row: published.Row) -> None:
    started = environment(plan(COLUMNS[1]))
    if row.by == "appliance":
        assert started[row.name] == row.here.format(cache=started["HF_HOME"].rpartition("/")[0])
    else:
        assert row.name not in started
        assert not row.here


@pytest.mark.parametrize("row", published.rows("flags"), ids=lambda row: row.name)
def test_flags_are_set_by_whom_it_says(row: published.Row) -> None:
    names = row.name.split(", ")
    for release in ("0.32", "0.33"):
        assert set(names) <= set(engine_facts(release).flags), release
    argv = arguments(plan(COLUMNS[1]))
    if row.by != "appliance":
        assert not set(names) & set(argv)
        return
    assert names == [row.here.partition(" ")[0]]
    flag, _, value = row.here.partition(" ")
    assert flag in argv
    if value:
        assert (flag, value) in set(itertools.pairwise(argv))


def test_every_row_has_a_source_and_files_of_ours_exist() -> None:
    every = [row for kind in published.KINDS for row in published.rows(kind)]
    assert len(every) == len({row.name for row in every}) > 25
    ours = published.DOCS.parent / "appliance/engines/vllm"
    for row in every:
        assert row.source
        for path in re.findall(r"\b(?:process|planning|api)/[\w/]+\.(?:py|yaml)", row.source):
            assert (ours / path).is_file(), path


def test_the_published_number_of_draft_tokens_is_served() -> None:
    argv = arguments(plan(COLUMNS[1]))
    assert json.loads(argv[argv.index("--speculative-config") + 1])["num_speculative_tokens"] == 3
