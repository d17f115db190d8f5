"""Command lines against the argument parser of a vLLM image and of the newer vLLM that GPU images have, and the image's
own facts against its parser.

`APPLIANCE_TEST_VLLM_IMAGE` names the image, `appliance:vllm-cpu` without it; skipped where that is not here. All
command lines of one call together cost one import of vLLM.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from appliance.engines.vllm.process import server
from appliance.errors import FatalError
from appliance.image_facts import ENGINE_FACTS_PATH, EngineFacts, parse_engine_facts
from images.matrix.matrix import load
from tests.container.stages.vllm_image import FOR_CUDA, IMAGE, NEWER, answered, answered_for_cuda, needs_image
from tests.golden.vllm_plans import CASES, SOCKET, engine_facts, nodes_of, space

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/vllm"
PARSE = Path(__file__).parent / "stages/vllm_parse.py"
MINIMAL = [
    *("serve", "/data/models/m", "--uds", "/tmp/v.sock", "--served-model-name", "m", "alias", "--dtype", "bfloat16"),
    *("--max-model-len", "2048", "--max-num-seqs", "4", "--max-num-batched-tokens", "2048"),
    *("--kv-cache-memory-bytes", "1073741824", "--kv-cache-dtype", "auto", "--tensor-parallel-size", "2"),
    *("--compilation-config", '{"cudagraph_capture_sizes":[1,2,4],"cudagraph_mode":"PIECEWISE"}'),
    *("--speculative-config", '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}'),
    *("--enable-prefix-caching", "--generation-config", "vllm", "--shutdown-timeout", "5"),
    *("--disable-uvicorn-access-log", "--disable-fastapi-docs", "--enable-prompt-tokens-details"),
]


@pytest.fixture(scope="module", autouse=True)
def _image() -> None:
    needs_image()


def complaints(lines: Sequence[Sequence[str]], *, newer: bool = False) -> list[str | None]:
    """Return vLLM's complaint about each command line; None if vLLM accepts the line."""
    found: list[str | None] = answered(PARSE, lines, newer=newer)
    return found


def golden_lines(facts: EngineFacts) -> Iterator[tuple[str, list[str]]]:
    """Yield the command lines of each golden plan, one for each host, with the name of the case."""
    for case in CASES:
        with suppress(FatalError):  # a case that is refused has no command line
            plan = space(case).predicted
            for node in nodes_of(plan):
                yield case.id, list(server.arguments(plan, facts, SOCKET, node))


@pytest.mark.parametrize("newer", [False, True], ids=["the image's", NEWER])
def test_the_command_lines_of_all_golden_plans_are_taken(newer: bool) -> None:
    names, lines = zip(*golden_lines(engine_facts("0.33" if newer else "0.32")), strict=True)
    assert len(set(names)) >= 12
    assert [(name, said) for name, said in zip(names, complaints(lines, newer=newer), strict=True) if said] == []


def test_the_build_for_cuda_takes_them_as_well() -> None:
    needs_image(FOR_CUDA)
    names, lines = zip(*golden_lines(facts(FOR_CUDA)), strict=True)
    said = answered_for_cuda(PARSE, [*lines, ["serve", "/m", "--spec-method", "medusa"]])
    assert [(name, words) for name, words in zip(names, said[:-1], strict=True) if words] == []
    assert "invalid choice: 'medusa'" in (said[-1] or "")


def test_the_build_for_cuda_says_of_itself_what_plans_are_tested_with() -> None:
    needs_image(FOR_CUDA)
    assert facts(FOR_CUDA) == engine_facts()


def test_the_newer_python_is_that_of_the_gpu_images_and_it_answers() -> None:
    assert {cell.engine.version for cell in load(ROOT).cells if cell.id.startswith("vllm-cu")} == {NEWER}
    taken, refused = complaints([MINIMAL, ["serve", "/m", "--spec-method", "medusa"]], newer=True)
    assert taken is None
    assert "invalid choice: 'medusa'" in (refused or ""), "0.32 takes it"


def facts(image: str = IMAGE) -> EngineFacts:
    argv = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "cat", image, ENGINE_FACTS_PATH]
    return parse_engine_facts(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_the_parser_takes_what_it_knows_and_says_what_it_does_not() -> None:
    wrong = {
        "--no-such-flag 3": "unrecognized arguments: --no-such-flag 3",
        "--max-model-len banana": "invalid human_readable_int_or_auto value: 'banana'",
        "--speculative-config {": "argument --speculative-config",
    }
    taken, *refused = complaints([MINIMAL, *(["serve", "/m", *flag.split()] for flag in wrong)])
    assert taken is None
    assert [said for said, expected in zip(refused, wrong.values(), strict=True) if expected not in (said or "")] == []


def test_the_images_facts_name_each_flag_that_the_parser_takes() -> None:
    known = set(facts().flags)
    assert {word for word in MINIMAL if word.startswith("--")} <= known
    listed = [each for each in facts().choices if "None" not in each.values]
    good = complaints([["serve", "/m", each.flag, each.values[-1]] for each in listed])
    assert [each.flag for each, said in zip(listed, good, strict=True) if said and "invalid choice" in said] == []
    bad = complaints([["serve", "/m", each.flag, "no-such-value"] for each in listed])
    assert [each.flag for each, said in zip(listed, bad, strict=True) if "invalid" not in (said or "")] == []
