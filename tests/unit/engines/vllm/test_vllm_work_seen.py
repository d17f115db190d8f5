"""When the work that takes most memory was seen, by a histogram of vLLM's metrics."""

from __future__ import annotations

import pytest

from appliance.engines.vllm.load_observed import has_filled_a_step, parse_work
from appliance.plan import with_launch
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, best, launch

PLAN = best(ADA)
EDGES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0)
NAME = "vllm:request_prefill_kv_computed_tokens"


def metrics(*prompts: int, engine: int = 0) -> bytes:
    """Return the histogram of prompt tokens in the form that 0.33.0 writes for these prompts."""
    labels = f'engine="{engine}",model_name="small"'
    edges = [(str(edge), sum(tokens <= edge for tokens in prompts)) for edge in EDGES]
    rows = [f'{NAME}_bucket{{{labels},le="{edge}"}} {count:.1f}' for edge, count in (*edges, ("+Inf", len(prompts)))]
    head = f"# HELP {NAME} Histogram of new KV tokens computed during prefill.\n# TYPE {NAME} histogram\n"
    rows += [f"{NAME}_count{{{labels}}} {len(prompts):.1f}", f"{NAME}_sum{{{labels}}} {sum(prompts):.1f}"]
    return (head + "\n".join(rows) + "\n").encode()


def test_the_plan_of_these_tests_reads_2048_tokens_in_a_step() -> None:
    assert launch(PLAN).max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("answer", "is_done"),
    [
        (metrics(*[30] * 19, 2001), True),
        (metrics(*[30] * 18, 2001), False),  # too few
        (metrics(*[30] * 100), False),
        (metrics(*[30] * 50, 1999), False),  # its bucket begins at 1,001
        (metrics(*[30] * 10) + metrics(*[30] * 10, 9000, engine=1), True),
        (b"", False),
        (b"vllm:num_requests_running 1.0\n\xff", False),
        (metrics(*[30] * 19, 2001).replace(b"_tokens_bucket", b"_bucket"), False),
        (metrics(*[30] * 19, 2001).replace(b" 20.0\n", b" 2e+1\n"), True),
        *(
            (metrics(*[30] * 19, 2001).replace(b" 20.0\n", odd), False)
            for odd in (b" .\n", b" 1e\n", b" NaN\n", b" +\n")
        ),
        (metrics(*[30] * 19, 2001).replace(b'le="+Inf"', b'le="x"').replace(b" 19.0\n", b" ..\n"), False),
    ],
)
def test_a_full_step_among_enough_requests(answer: bytes, is_done: bool) -> None:
    assert has_filled_a_step(answer, PLAN) is is_done


def test_a_step_beyond_every_bucket_is_never_known_to_be_full() -> None:
    larger = with_launch(PLAN, max_num_batched_tokens=32_768)
    assert not has_filled_a_step(metrics(*[30] * 30, 40_000), larger)


def test_nothing_tells_of_images() -> None:
    sees = with_launch(PLAN, sees=True)
    assert not has_filled_a_step(metrics(*[30] * 30, 2001), sees)


def test_blocks_and_tokens_are_work_done_and_nothing_else_is() -> None:
    names = ("kv_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total")
    idle = ["process_cpu_seconds_total 5.0", 'vllm:num_requests_running{engine="0"} 1.0', "# TYPE vllm:prompt_tokens"]
    before = parse_work("\n".join([*idle, *(f'vllm:{name}{{engine="0"}} 1.0' for name in names)]).encode())
    assert len(before) == len(names)
    for moved in names:
        figures = [f'vllm:{name}{{engine="0"}} {2.0 if name == moved else 1.0}' for name in names]
        assert parse_work("\n".join(figures).encode()) != before
    others = ["process_cpu_seconds_total 6.0", 'vllm:num_requests_running{engine="0"} 9.0']
    assert parse_work("\n".join([*others, *(f'vllm:{name}{{engine="0"}} 1.0' for name in names)]).encode()) == before
    assert parse_work(b"") == ()
