"""A preview as text, and as JSON for scripts, which docs/plan.schema.json describes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from appliance.console.shown import quoted
from appliance.plan import Head, as_document, explain, explain_settings, head_of
from appliance.preview.preview import Preview
from appliance.profile import Profile, speeds_of
from appliance.weights.cache.size import in_column

if TYPE_CHECKING:
    from appliance.probe.machine.described import DescribedMachine

SCHEMA = 1  # stays while fields are only added: readers of an older document find all that they know


def head(found: Preview, argv: Sequence[str]) -> Head:
    """Return the five lines that a plan opens with."""
    speeds = speeds_of(found.plan, found.profile)
    return head_of(
        found.plan,
        " ".join(map(quoted, argv)),
        native=found.start.inputs.model.native_context,
        larger=found.larger_contexts,
        measured=speeds.describe() if speeds else "",
        to_measure=() if speeds else found.to_measure,
    )


def plan_document(found: Preview, machine: DescribedMachine | None, argv: Sequence[str]) -> dict[str, Any]:
    profile, status, fetches = found.profile, found.status, found.fetches
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "head": asdict(head(found, argv)),
        "larger_contexts": [asdict(each) for each in found.larger_contexts],
        "to_measure": list(found.to_measure),
        "plan": as_document(found.plan),
        "profile": profile.key.id if profile else None,
        "standing": status.as_document() if status else None,
    }
    if found.foreign:
        document["foreign_plan"] = found.foreign.describe()
    if found.abilities:
        document["abilities"] = found.abilities.as_document()
    if profile and (checks := profile.checks.as_document()):
        document["checks"] = checks
    if fetches:
        document["fetches"] = {"model": fetches.candidate.name, "bytes": fetches.candidate.missing_bytes}
    if quantization := found.start.quantization:
        file = quantization.file
        document["quantization"] = {
            "type": quantization.kind or quantization.origin.label,
            "words": quantization.describe(),
            "comes_first": quantization.comes_first,
            "file": str(file.path) if file else "",
            "loss": file.loss_in_words if file else "",
        }
    if count := found.start.settings.experts_used:
        loss = found.experts_loss
        document["experts_used"] = {"count": count, "loss": asdict(loss) if loss else None, "words": _loss(found)}
    if stand := found.stand:
        document["cell"] = {"name": stand.cell, "facts_of": stand.facts_of, "is_picked": stand.is_picked}
    if found.shape:
        document["shape"] = {"name": found.shape.name, "source": found.shape.shape.source}
    if machine:
        document["machine"] = {"source": machine.source, "assumed": list(machine.assumed)}
    if found.warnings:
        document["warnings"] = list(found.warnings)
    return {**document, "argv": list(argv)}


def plan_text(
    found: Preview, machine: DescribedMachine | None, argv: Sequence[str], *, is_verbose: bool = False
) -> str:
    """Return five lines to act on, then what they are for, then the reasons in the order of decision."""
    return "\n".join((
        f"{head(found, argv).describe()}\n",
        *(f"warning: {words}" for words in found.warnings),
        *_subject(found, machine),
        *_origin(found),
        *(found.abilities.lines() if found.abilities else ()),
        *(found.profile.checks.lines() if found.profile else ()),
        f"\nreasons, in the order of decision\n{_indented(explain(found.plan, is_verbose=is_verbose))}\n",
        f"settings\n{_indented(explain_settings(found.start.settings))}",
    ))  # fmt: skip


def _subject(found: Preview, machine: DescribedMachine | None) -> Iterator[str]:
    if machine:
        yield f"for the machine of {machine.source}, not for this one"
    if found.stand:
        yield found.stand.describe()
    if found.shape:
        yield f"no file: the shape of {found.shape.name}, in the usual mixture of types ({found.shape.shape.source})"
    if found.start.quantization:
        yield found.start.quantization.describe()
    if found.start.settings.experts_used:
        yield _loss(found)
    if found.fetches:
        candidate = found.fetches.candidate
        size = in_column(candidate.missing_bytes)
        yield f"not on the volume: a start fetches {candidate.name} first, {size}"


def _loss(found: Preview) -> str:
    """Return what fewer experts a token cost, in words."""
    asked, usual = found.start.settings.experts_used, found.start.inputs.model.experts_used
    loss = found.experts_loss.describe() if found.experts_loss else "loss unknown: it is measured while idle"
    return f"{asked} experts a token instead of {usual}, so answers change: {loss}"


def _origin(found: Preview) -> Iterator[str]:
    profile, status = found.profile, found.status
    speeds = speeds_of(found.plan, profile)  # of this plan: in some modes it is not the profile's best
    yield (
        f"from profile {profile.key.id}, measured {profile.created}{f': {speeds.describe()}' if speeds else ''}"
        if profile
        else f"foreign until it is measured here: {found.foreign.describe()}"
        if found.foreign
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
