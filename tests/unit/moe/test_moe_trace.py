"""Hostile traces: an error with the number of the line, and bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.moe.trace import COLUMNS, LINE_MAX, TOKENS_MAX, Trace, TraceError, parse_trace
from benchmarks import hybrid, hybrid_read
from tests.builders import examples
from tests.unit.moe.routing import lines, row, trace

Change = Callable[[list[str]], list[str]]


def without(number: int) -> Change:
    return lambda found: found[: number - 1] + found[number:]


def instead(number: int, line: str) -> Change:
    return lambda found: [*found[: number - 1], line, *found[number:]]


def test_a_whole_trace_is_read() -> None:
    found = parse_trace(lines())
    assert (found.layers, found.experts, found.top_k, found.decoded) == (2, 8, {0: 2, 1: 2}, 3)
    assert (found.name, found.architecture) == ("m.gguf", "test")
    assert found.tokens(found.turns[0], is_prompt=False, layer=1) == [(2, 3), (3, 4), (4, 5)]
    assert found.tokens(found.turns[0], is_prompt=True, layer=0) == [(0, 1), (0, 1)]


# Lines 4 to 11 are the prompt, 12 to 15 the first decoded token: layers 0 and 1, two experts each.
@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (instead(13, "0,1,2,0,1,"), 13, "cut or damaged: 6 columns"),
        (instead(13, "0,1,2,0,1,x,0.5,0,100\n"), 13, "not a number"),
        (instead(13, row(1, 2, 0, 1, 8)), 13, "expert out of range 0 to 7: 8"),
        (instead(13, row(1, 2, 0, 1, -1)), 13, "expert out of range"),
        (instead(13, row(1, 2, 0, 1, 2)), 13, "expert 2 twice in one token"),
        (instead(13, row(1, 2, 9, 0, 1)), 13, "layer out of range 0 to 1: 9"),
        (instead(13, row(2, 2, 0, 1, 3)), 13, "phase is neither"),
        (instead(13, "0,1,2,0,1,3,nan,0,100\n"), 13, "weight is not finite"),
        (without(13), 13, "before this line: 1 experts instead of 2"),
        (without(12), 12, "slot 1 where 0 was expected"),
        (lambda found: found[:13] + found[15:], 14, "layer 1 is missing"),
        (lambda found: found[:-2], 21, "layer 1 is missing"),
        (lambda found: found[:-1], 22, "1 experts instead of 2"),
        (lambda found: found[:15] + found[11:], 16, "token twice or out of order"),
        (lambda found: [*found, row(0, 99, 0, 0, 1)], 24, "a prompt row after decoded tokens"),
        (instead(13, row(1, 2, 0, 1, 3, turn=-1)), 13, "cannot be below 0"),
        (without(3), 3, "column names"),
        (without(2), 2, "name no n_expert"),
        (lambda found: found[:11], 11, "no decoded token"),
        (lambda found: found[:2], 2, "column names is missing"),
        (instead(13, "9" * (LINE_MAX + 1)), 13, "longer than"),
        (lambda _: [], 0, "column names is missing"),
    ],
)
def test_what_is_damaged_is_refused_with_its_line(change: Change, line: int, words: str) -> None:
    with pytest.raises(TraceError, match=words) as raised:
        parse_trace(change(lines()))
    assert raised.value.line == line
    assert str(raised.value).startswith(f"line {line}: ")


@pytest.mark.thorough
def test_ten_million_tokens_end_at_the_limit_in_bounded_memory() -> None:
    """A smaller limit, since memory is traced slowly; the shipped one is below what was asked for."""
    limit, seen = 20_000, 0

    def endless() -> Iterator[str]:
        nonlocal seen
        yield from ("# n_layer=1 n_expert=8\n", COLUMNS + "\n")
        for step in range(10**7):
            seen = step
            yield f"0,1,{step},0,0,{step % 8},1,0,1\n"

    tracemalloc.start()
    with pytest.raises(TraceError, match=r"line 20003: more than 20,000 tokens"):
        parse_trace(endless(), tokens_max=limit)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    assert seen == limit < TOKENS_MAX < 10**7


@pytest.mark.thorough
def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "bomb.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("9" * 50_000_000)
    tracemalloc.start()
    with pytest.raises(TraceError, match="line 1: longer"):
        hybrid.read_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_a_recorded_trace_read_by_blocks_is_what_it_is_line_by_line(name: str) -> None:
    with gzip.open(hybrid.TRACES / f"{name}.csv.gz", "rt") as file:
        text = file.read()
    assert by_block(text, block_bytes=100_000) == parse_trace(io.StringIO(text))  # many blocks, cut anywhere


def by_block(text: str, block_bytes: int = hybrid_read.BLOCK) -> Trace | None:
    return hybrid_read.read_regular(lambda: io.BytesIO(text.encode()), block_bytes=block_bytes)


def test_turns_and_weights_with_an_exponent_are_read_by_blocks() -> None:
    found = [*lines(tokens=4), row(0, 50, 0, 0, 1, turn=1), row(0, 50, 0, 1, 2, turn=1)]
    found[5] = found[5].replace("0.5", "1e-05")
    assert by_block("".join(found)) == parse_trace(found)
    assert by_block("".join(lines(layers=1, experts=300, top_k=7, prompt=0))) is not None


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_what_is_read_by_blocks_is_never_what_is_refused_by_line(data: st.DataObject) -> None:
    """Whatever one or two changed letters make of a trace."""
    text = list("".join(lines(tokens=4)))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.sampled_from(["", *"0123456789.,-+e# \n\r_é", text[at] * 2]))
    changed = "".join(text)
    found = by_block(changed)
    if found is not None:
        assert found == parse_trace(io.StringIO(changed))


def test_a_file_of_endless_tokens_is_given_up_by_blocks_too() -> None:
    text = "".join(lines(tokens=5000)).encode()
    seen = []

    def counted(
        work: Callable[[bytes], hybrid_read.Groups | None], blocks: Iterable[bytes]
    ) -> Iterator[hybrid_read.Groups | None]:
        for block in blocks:
            seen.append(len(block))
            yield work(block)

    assert hybrid_read.read_regular(lambda: io.BytesIO(text), counted, block_bytes=1000, tokens_max=50) is None
    assert sum(seen) < 10_000 < len(text)


def test_halves_and_turns() -> None:
    found = parse_trace([*lines(tokens=4), row(0, 50, 0, 0, 1, turn=1), row(0, 50, 0, 1, 2, turn=1)])
    assert len(found.turns) == 2
    assert [half.decoded for half in (found.half(is_second=False), found.half(is_second=True))] == [2, 2]


def test_a_machine_is_read_and_a_wrong_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    rates = {
        "cpu_gb_s": 50,
        "pcie_gb_s": 20,
        "dram_gb_s": 60,
        "other_ms": 0.1,
        "cpu_fixed_ms": 0,
        "gpu_expert_ms": 0.01,
    }
    path.write_text(json.dumps({"expert_mb": 3.0, **rates}))
    assert hybrid.read_machine(path).name == "box"
    path.write_text(json.dumps({"expert_mb": 3.0, **rates, "gpu": 1}))
    with pytest.raises(ValueError, match="gpu"):
        hybrid.read_machine(path)
    for text in ("[]", "{", json.dumps({"expert_mb": -1, **rates}), json.dumps({"expert_mb": [3], **rates})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"box\.json: "):
            hybrid.read_machine(path)
    path.write_text(json.dumps(rates))
    unsized = hybrid.read_machine(path)
    assert [each.expert_mb for each in hybrid.sized([unsized], replace(trace(1), expert_mb=2.5))] == [2.5]
    with pytest.raises(ValueError, match="box: neither the rates nor the trace name expert_mb"):
        hybrid.sized([unsized], trace(1))


def test_the_size_of_an_expert_is_that_of_the_head() -> None:
    head, names, columns, *rows = lines()
    sizes = ["# layer=0 expert_bytes=3000000\n", "# layer=1 expert_bytes=2000000\n"]
    assert parse_trace([head, names, *sizes, columns, *rows]).expert_mb == 2.5
    assert parse_trace([head, names, columns, *rows]).expert_mb is None
    with pytest.raises(TraceError, match="line 3: not the size of an expert, or of too many layers: '-5'"):
        parse_trace([head, names, "# layer=0 expert_bytes=-5\n", columns, *rows])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress("".join(lines()).encode())[:-20], "ended before"),
        (b"\x1f\x8b" + b"x" * 40, "Unknown compression"),
        (gzip.compress("".join([*lines(), "0,1\n"]).encode()), "line 24: cut or damaged: 2 columns"),
    ],
    ids=("cut", "damaged", "short row"),
)
def test_a_trace_that_cannot_be_read_is_refused_by_file_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    path = tmp_path / "one.csv.gz"
    path.write_bytes(content)
    monkeypatch.setattr("sys.argv", ["hybrid", "--trace", str(path)])
    with pytest.raises(SystemExit, match=rf"error: .*one\.csv\.gz: .*{words}"):
        hybrid.main()
