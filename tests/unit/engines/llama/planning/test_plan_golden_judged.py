"""The kept plans and choices, read as a stranger would: sums that must be right and flags that the engine must know.

They are written by the planner, and `test_plan_golden` only says that it still writes them. What is asked here is asked
of the texts alone: a planner that reckons wrongly does not get by with a new text.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.engines.llama.process.facts import parse_flags
from tests.builders import USAGE

GOLDEN = Path(__file__).parents[4] / "golden"
PLANS = [path for path in sorted((GOLDEN / "plans").glob("*.txt")) if " --model " in path.read_text(encoding="utf-8")]
CHOICES = sorted((GOLDEN / "choices").glob("*.txt"))
FLAGS = parse_flags(USAGE)  # of the pinned engine's own --help


def number(text: str) -> int:
    return int(text.replace(",", ""))


class Kept:
    def __init__(self, path: Path) -> None:
        text = re.sub(r"\n +", " ", path.read_text(encoding="utf-8"))
        self.rows = dict(line.split(maxsplit=1) for line in text.splitlines() if re.match(r"[a-z_]+ +\S", line))
        self.words = next(line for line in text.splitlines() if " --model " in line).split(" ")
        self.memory = self.rows["memory"]

    def value(self, name: str) -> str:
        return re.split(r"[:;] ", self.rows[name])[0].strip()

    def argument(self, flag: str) -> str:
        return self.words[self.words.index(flag) + 1]


@pytest.fixture(params=PLANS, ids=lambda path: path.stem)
def kept(request: pytest.FixtureRequest) -> Kept:
    return Kept(request.param)


def test_the_engine_knows_every_flag(kept: Kept) -> None:
    flags = [word for word in kept.words if re.fullmatch(r"--[a-z][a-z-]+", word)]
    assert [flag for flag in flags if flag not in FLAGS] == []
    assert len(set(flags)) == len(flags) > 10


def test_what_is_said_is_what_the_engine_is_told(kept: Kept) -> None:
    context = number(kept.value("context").split(" ")[0])
    assert kept.argument("--ctx-size") == str(context)
    assert context % 256 == 0
    k, _, v = kept.value("kv_type").partition("/")
    assert (kept.argument("--cache-type-k"), kept.argument("--cache-type-v")) == (k, v or k)
    for name, flag in (("ubatch", "--ubatch-size"), ("threads", "--threads"), ("parallel", "--parallel")):
        assert kept.argument(flag) == kept.value(name).replace(",", "")
    if "--device" not in kept.words or kept.argument("--device") == "none":
        assert not kept.rows.get("placement", "CPU").startswith("CUDA")
    else:
        layers = [int(count) for count in re.findall(r"CUDA\d+ (\d+)", kept.value("placement"))]
        assert len(layers) == len(kept.argument("--device").split(","))


def test_nothing_takes_more_than_there_is(kept: Kept) -> None:
    cards = re.findall(r"CUDA\d+ ([\d,]+) of ([\d,]+) MiB", kept.memory)
    assert len(cards) == (0 if "--device" not in kept.words else len(re.findall("CUDA", kept.argument("--device"))))
    assert all(number(taken) <= number(there) for taken, there in cards)
    said = re.search(r"(?:^|host )([\d,]+) MiB predicted: (.*); leaves ([\d,]+) of ([\d,]+) usable", kept.memory)
    assert said, kept.memory
    parts = [number(part) for part in re.findall(r"(?:^|, )([\d,]+) ", said[2])]  # `of which` is a part of a part
    assert abs(sum(parts) - number(said[1])) <= len(parts)
    assert abs(number(said[1]) + number(said[3]) - number(said[4])) <= 1


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_one_is_chosen_of_those_that_fit_and_none_is_faster_than_its_smaller_sister(path: Path) -> None:
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if re.search(r"\d GB ", line)]
    assert rows
    chosen = [row for row in rows if row.startswith("*")]
    assert len(chosen) <= 1
    assert all("chosen" in row for row in chosen)
    speeds: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        found = re.match(r"[*+ ]+\S+:(\S+?)-(?:ud-)?i?q\d\S* +([\d.]+) GB +all on the GPU +[\d,]+ +([\d,]+) ", row)
        if found:
            speeds.setdefault(found[1], []).append((float(found[2]), number(found[3])))
    for of_model in speeds.values():
        by_size = [speed for _, speed in sorted(of_model)]
        assert by_size == sorted(by_size, reverse=True)
