"""A preview as text, and as JSON for scripts, which docs/plan.schema.json describes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from appliance.plan import as_document, explain, explain_settings
from appliance.preview.preview import Preview
from appliance.profile import Profile, speeds_of
from appliance.weights.cache.size import in_column

if TYPE_CHECKING:
    from appliance.probe.machine.described import DescribedMachine

SCHEMA = 1  # stays while fields are only added: readers of an older document find all that they know


def plan_document(found: Preview, machine: DescribedMachine | None, argv: Sequence[str]) -> dict[str, Any]:
    profile, status, fetches = found.profile, found.status, found.fetches
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "plan": as_document(found.plan),
        "profile": profile.key.id if profile else None,
        "standing": status.as_document() if status else None,
    }
    if fetches:
        document["fetches"] = {"model": fetches.candidate.name, "bytes": fetches.candidate.missing_bytes}
    if found.shape:
        document["shape"] = {"name": found.shape.name, "source": found.shape.shape.source}
    if machine:
        document["machine"] = {"source": machine.source, "assumed": list(machine.assumed)}
    if found.warnings:
        document["warnings"] = list(found.warnings)
    return {**document, "argv": list(argv)}


def plan_text(found: Preview, machine: DescribedMachine | None, *, is_verbose: bool = False) -> str:
    return "\n".join((
        *(f"warning: {words}\n" for words in found.warnings),
        *_subject(found, machine),
        f"settings\n{_indented(explain_settings(found.start.settings))}\n",
        f"plan\n{_indented(explain(found.plan, is_verbose=is_verbose))}\n",
        *_expert_cache(found),
        *_origin(found),
    ))  # fmt: skip


def _subject(found: Preview, machine: DescribedMachine | None) -> Iterator[str]:
    if machine:
        yield f"for the machine of {machine.source}, not for this one\n"
    if found.shape:
        yield f"no file: the shape of {found.shape.name}, in the usual mixture of types ({found.shape.shape.source})\n"
    if found.fetches:
        candidate = found.fetches.candidate
        size = in_column(candidate.missing_bytes)
        yield f"not on the volume: a start fetches {candidate.name} first, {size}\n"


def _expert_cache(found: Preview) -> Iterator[str]:
    if modelled := found.space.modelled(found.plan):
        yield f"expert cache, not served by this engine: {modelled}\n"


def _origin(found: Preview) -> Iterator[str]:
    profile, status = found.profile, found.status
    speeds = speeds_of(found.plan, profile)  # of this plan: in some modes it is not the profile's best
    yield (
        f"from profile {profile.key.id}, measured {profile.created}{f': {speeds.describe()}' if speeds else ''}"
        if profile
        else "a prediction; measuring decides between it and others that fit"
    )
    if status and status.describe():
        yield _indented("\n".join(status.describe()))
    if profile:
        yield from _allocated(profile)


def _allocated(profile: Profile) -> Iterator[str]:
    if profile.prediction_error is not None and profile.allocated:
        yield (
            f"when it was measured the engine allocated {profile.allocated.total:,.0f} MiB; "
            f"the prediction was off by {profile.prediction_error:+.1%}"
        )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
