"""Strategies of fleets for the properties of admission. MiB are whole and errors are powers of two, so that sums are
exact."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from appliance.fleet.admit import Places, Resident, Variant

PLACES = ("GPU-0", "GPU-1", "host")
MOST_MIB = 64


def places(least: int = 0) -> st.SearchStrategy[dict[str, float]]:
    return st.dictionaries(st.sampled_from(PLACES), st.integers(least, MOST_MIB).map(float), max_size=len(PLACES))


variants = st.builds(
    Variant,
    key=st.sampled_from(("a", "b", "c")),
    needs=places(),
    speed=st.integers(1, 100).map(float),
    error=st.sampled_from((0.0, 0.03125, 0.25)),
)


def residents(most: int) -> st.SearchStrategy[list[Resident]]:
    each = st.builds(
        Resident,
        name=st.sampled_from([f"m{number:02}" for number in range(2 * most)]),
        holds=places(),
        is_pinned=st.sampled_from((False, False, False, True)),
        is_answering=st.sampled_from((False, False, False, True)),
        reload_s=st.integers(0, 60).map(float),
        use_chance=st.sampled_from((0.0, 0.125, 0.5, 0.75, 1.0)),
        cache_s=st.integers(0, 8).map(float),
    )
    return st.lists(each, max_size=most, unique_by=lambda resident: resident.name)


@dataclass(frozen=True, kw_only=True)
class Case:
    variants: list[Variant]
    residents: list[Resident]
    free: Places


def cases(most: int = 6) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        variants=st.lists(variants, min_size=1, max_size=4),
        residents=residents(most),
        free=places(-MOST_MIB // 2),
    )
