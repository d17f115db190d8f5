"""The pages: every link leads somewhere, every anchor is a heading there, and no exit code lacks its paragraph."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from appliance import errors
from images import errors as images_errors
from images.choice import cards, proofs
from images.matrix import drift, matrix
from tests import settings_page

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs/", "appliance/", "images/", "tests/", "benchmarks/", "compose/", ".devcontainer/", ".ci/", ".github/")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("", *FOLDERS)
    for pattern in (f"{folder}**/*.md" if folder else "*.md",)
    for path in ROOT.glob(pattern)
)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`[^`\n]+`")
# Inline, in a reference's definition, and in HTML.
LINK = re.compile(
    r"""!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+"[^"]*")?\)|^\[[^\]]+\]:\s+(\S+)|(?:href|src)="([^"]+)\"""", re.MULTILINE
)
LINKS = [
    (page, target)
    for page in PAGES
    for targets in LINK.findall(SPAN.sub("``", FENCED.sub("", (ROOT / page).read_text("utf-8"))))
    for target in targets
    if target
]
FILE = re.compile(r"`((?:[a-z_.]+/)+[a-z_0-9]+\.py)`")  # in a span; capitals stand for a name to be chosen
HERE = [(page, target) for page, target in LINKS if "://" not in target]
ABROAD = sorted({target for _, target in LINKS if "://" in target})
CODE = re.compile(r"^### (\d+)$", re.MULTILINE)
FIGURES: dict[str, str] = yaml.safe_load((ROOT / "docs/figures.yaml").read_text("utf-8"))


def codes(module: object) -> set[int]:
    """Return the exit codes of all errors of a module."""
    found = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Exception))
    return {each.exit_code for each in found if hasattr(each, "exit_code")}


ALL_CODES = codes(errors) | codes(images_errors)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that forges make from headings: lower case, without punctuation, spaces as dashes. A repeated
    name gets a number."""
    seen: dict[str, int] = {}
    found = []
    for heading in re.findall(r"^#{1,6} (.+)$", FENCED.sub("", page.read_text("utf-8")), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")
        found.append(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return frozenset(found)


def test_there_are_pages_and_links() -> None:
    assert {"README.md", "docs/README.md", "docs/errors.md", "images/README.md"} <= set(PAGES)
    assert len(HERE) > 60


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = [target for each, target in HERE if each == page]
    missing = [target for target in targets if not ((ROOT / page).parent / target.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_project_that_pages_name_exist(page: str) -> None:
    folder = (ROOT / page).parent
    tops = {"..", *(path.name for top in (ROOT, ROOT / "appliance") for path in top.iterdir() if path.is_dir())}
    named = {name for name in FILE.findall((ROOT / page).read_text("utf-8")) if name.partition("/")[0] in tops}
    missing = {name for name in named if not any((top / name).exists() for top in (folder, ROOT, ROOT / "appliance"))}
    # A table of a folder may leave out the first folders of a path.
    assert [name for name in sorted(missing) if name.startswith("..") or not any(folder.rglob(name))] == []


@pytest.mark.parametrize("page", PAGES)
def test_anchors_are_headings(page: str) -> None:
    wrong = []
    for target in (target for each, target in HERE if each == page and "#" in target):
        path, _, anchor = target.partition("#")
        other = ((ROOT / page).parent / path) if path else ROOT / page
        if other.suffix == ".md" and anchor not in anchors(other):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("target", ABROAD)
def test_what_is_elsewhere_is_asked_for_safely(target: str) -> None:
    assert re.match(r"https://[\w.-]+\.[a-z]{2,}(/|$)", target), target


def test_every_page_of_the_folder_is_in_its_index() -> None:
    index = {target.partition("#")[0] for page, target in HERE if page == "docs/README.md"}
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= index, pages - index


def test_every_exit_code_has_its_paragraph_and_every_paragraph_a_code() -> None:
    text = (ROOT / "docs/errors.md").read_text("utf-8")
    assert [int(code) for code in CODE.findall(text)] == sorted(ALL_CODES)
    paragraphs = CODE.split(text)[2::2]
    assert all(len(paragraph.split()) > 10 for paragraph in paragraphs)


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_front_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text("utf-8").splitlines()) <= 130


def test_the_page_of_the_build_half_is_of_use_alone() -> None:
    assert len((ROOT / "images/README.md").read_text("utf-8").splitlines()) <= 120


def test_every_setting_is_on_its_page() -> None:
    assert settings_page.PAGE.read_text("utf-8") == settings_page.page(), "python3 -m tests.settings_page"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_the_front_page_is_that_of_its_row(name: str) -> None:
    """Both front pages contain the figure literally. One row or paragraph of figures.md has all of its numbers."""
    shown = FIGURES[name]
    assert shown in (ROOT / "README.md").read_text("utf-8")
    assert shown in (ROOT / "README.zh-CN.md").read_text("utf-8")
    numbers = [re.compile(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)") for number in re.findall(r"\d[\d.]*", shown)]
    parts = re.split(r"\n\n|\n(?=\|)", (ROOT / "docs/figures.md").read_text("utf-8"))
    assert any(all(number.search(part) for number in numbers) for part in parts), shown


def test_both_readmes_say_the_same() -> None:
    """The comparison needs no Chinese: headings, commands, and the names in each row of a table."""
    english, chinese = (readme(name) for name in ("README.md", "README.zh-CN.md"))
    assert english.headings == chinese.headings
    assert english.commands == chinese.commands
    assert english.rows == chinese.rows


class readme:  # noqa: N801 - it reads like a function
    """Return the parts of a README that do not depend on the language."""

    def __init__(self, name: str) -> None:
        text = (ROOT / name).read_text("utf-8")
        prose = FENCED.sub("", text)
        self.headings = [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)]
        lines = [line.partition(" #")[0].strip() for line in prose.splitlines() if line.startswith("    ")]
        self.commands = [line for line in lines if line]
        tables = [line for line in prose.splitlines() if line.startswith("|")]
        self.rows = [(line.count("|"), sorted(SPAN.findall(line))) for line in tables]


def test_the_page_of_cards_is_what_the_matrix_says() -> None:
    loaded = matrix.load(ROOT)
    record = proofs.Record(proofs=proofs.load(ROOT, loaded.cells))
    assert drift.drift(ROOT, {cards.PAGE: cards.page(loaded, record)}) == []


def test_the_page_of_cards_says_what_select_says() -> None:
    text = (ROOT / cards.PAGE).read_text("utf-8")
    assert "| 120 | amd64 | 570.26 or newer | `llama-cu128-sm120` |" in text
    numbers = [int(sm) for sm in re.findall(r"^\| (\d+) \| (?:amd64|arm64)", text, re.MULTILINE)]
    assert numbers == sorted(numbers)
    assert {75, 80, 86, 89, 90, 100, 103, 110, 120, 121} == set(numbers)


@pytest.mark.parametrize(
    "card", ["GeForce RTX 2080 Ti", "GeForce RTX 3090", "GeForce RTX 4090", "GeForce RTX 5090", "H100", "GB10"]
)
def test_well_known_cards_are_named_once(card: str) -> None:
    table = (ROOT / cards.PAGE).read_text("utf-8").partition("## Names")[2]
    names = [name.strip() for row in table.splitlines()[4:] for name in row.strip("| ").partition("|")[2].split(",")]
    assert names.count(card) == 1


def test_charts_are_those_that_the_command_draws() -> None:
    shown = {target for page, target in HERE if page == "docs/decisions.md" and target.endswith(".svg")}
    drawn = {f"charts/{path.name}" for path in (ROOT / "docs/charts").glob("*")}
    assert shown == drawn
    script = (ROOT / "benchmarks/charts.py").read_text("utf-8")
    assert all(f'"{Path(name).stem}"' in script for name in drawn)
