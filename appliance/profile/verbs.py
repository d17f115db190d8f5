"""`appliance profiles …`: each verb returns what it prints, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from appliance.errors import ConfigError, UsageError
from appliance.plan import as_document, explain, summary
from appliance.profile.record import SCHEMA, Key, Profile, dump_profile, parse_profile, speeds_document, speeds_of
from appliance.profile.store import ProfileStore

# Fields of a plan's document that are long, or follow from the other fields.
_NOT_COMPARED = frozenset({"choices", "key", "knobs", "launch", "memory", "model_path"})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Output of a verb: `text` goes to standard output, `note` is for people and goes to standard error."""

    text: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class CliContext:
    """Dependencies of the verbs. `this_key` inspects this machine and its model; `writable` raises if the volume is
    read-only."""

    store: ProfileStore
    folder: str
    this_key: Callable[[], Key]
    writable: Callable[[], None]
    read_input: Callable[[], str]
    as_json: bool


def answer(action: str, ids: list[str], context: CliContext) -> Answer:
    """Run one verb. Raises UsageError if the number of ids does not fit the verb."""
    least, most = {"list": (0, 0), "import": (0, 0), "diff": (1, 2)}.get(action, (1, 1))
    if not least <= len(ids) <= most:
        few = len(ids) < least
        message = f"profiles {action} {'needs an id' if few else f'takes at most {most}, got {len(ids)}'}"
        raise UsageError(message, hint="`appliance profiles list` lists the ids")
    verbs: dict[str, Callable[[], Answer]] = {
        "list": lambda: _list(context),
        "show": lambda: _show(context, ids[0]),
        "export": lambda: Answer(text=dump_profile(context.store.find(ids[0])).rstrip("\n")),
        "import": lambda: _import(context),
        "diff": lambda: _diff(context, ids),
        "pin": lambda: _pin(context, ids[0]),
        "unpin": lambda: _unpin(context, ids[0]),
        "forget": lambda: _forget(context, ids[0]),
    }
    return verbs[action]()


def _list(context: CliContext) -> Answer:
    found = context.store.all()
    foreign = context.store.foreign()
    note = "".join(f"{each.id}: kept for another version, schema {each.schema}, ours is {SCHEMA}\n" for each in foreign)
    if context.as_json:
        return Answer(text=json.dumps([_row(profile, context.store) for profile in found], indent=1), note=note)
    if not found and not note:
        note = f"no profiles in {context.folder}\n"
    return Answer(text="\n".join(_line(profile, context.store) for profile in found), note=note)


def _row(profile: Profile, store: ProfileStore) -> dict[str, Any]:
    row = {"id": profile.key.id, "model": profile.plan.alias, "created": profile.created, "speed": profile.speed}
    return {**row, "key": profile.key.parts, **store.status(profile).as_document()}


def _line(profile: Profile, store: ProfileStore) -> str:
    marks = "".join(f"  {name}" for name, found in store.status(profile).as_document().items() if found)
    plan = profile.plan
    return f"{profile.key.id}  {profile.created}{marks}  {plan.alias}: {summary(plan)}; {profile.speed}"


def _show(context: CliContext, key_id: str) -> Answer:
    profile = context.store.find(key_id)
    status = context.store.status(profile)
    if context.as_json:
        document = json.loads(dump_profile(profile)) | {
            "speeds": speeds_document(profile.plan, speeds_of(profile.plan, profile))
        }
        document |= {"stale": status.stale} if status.stale else {}
        return Answer(text=json.dumps(document, indent=1, sort_keys=True))
    parts = "\n".join(f"{name}: {value}" for name, value in sorted(profile.key.parts.items()))
    measured = "\n".join(measurement.describe() for measurement in profile.measurements)
    measured = "\n".join((measured, *status.describe()))
    if profile.gpu_uuids:
        measured += f"\non {', '.join(profile.gpu_uuids)}"
    head = f"key\n{_indented(parts)}\n\nplan\n{_indented(explain(profile.plan))}\n"
    return Answer(text=f"{head}\nmeasured {profile.created}\n{_indented(measured)}")


def _import(context: CliContext) -> Answer:
    try:
        profile = parse_profile(context.read_input())
    except ValueError as error:
        message = f"profile cannot be imported: {error}"
        raise ConfigError(message, hint="pass the unchanged output of `appliance profiles export ID`") from error
    context.writable()
    if not context.store.save(profile):
        id_ = profile.key.id
        if context.store.is_pinned(id_):
            message = f"profile cannot be imported: {id_} exists and is pinned"
            raise ConfigError(message, hint=f"`appliance profiles unpin {id_}` allows replacing it")
        message = f"profile cannot be imported: {id_} exists, and the new one was disturbed: {profile.disturbance}"
        raise ConfigError(message, hint=f"`appliance profiles forget {id_}` removes the existing one")
    used = "used by the next start whose model, machine, image and settings are the same"
    return _told(context, {"imported": profile.key.id}, f"{profile.key.id}: {used}")


def _diff(context: CliContext, ids: list[str]) -> Answer:
    """List the differences of two profiles, or of a profile and this machine with its model, each with both values."""
    old = context.store.find(ids[0])
    if len(ids) == 2:
        new = context.store.find(ids[1])
        name, key = new.key.id, _changes(old.key.parts, new.key.parts)
        plan = _changes(_compared(old), _compared(new))
    else:
        name, key, plan = "this machine", _changes(old.key.parts, context.this_key().parts), {}
    if context.as_json:
        return Answer(text=json.dumps({"from": old.key.id, "to": name, "key": key, "plan": plan}, indent=1))
    lines = [f"{part}: {before} -> {after}" for part, (before, after) in key.items()]
    lines += [f"plan.{part}: {before} -> {after}" for part, (before, after) in plan.items()]
    return Answer(text="\n".join(lines), note="" if lines else f"{old.key.id} and {name} do not differ\n")


def _compared(profile: Profile) -> dict[str, Any]:
    document = as_document(profile.plan)
    fields = {name: value for name, value in document.items() if name not in _NOT_COMPARED}
    return {**fields, **document["launch"], "speed": profile.speed, "job_s": profile.job_s}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (old, new) for each part that differs; a missing part is None."""
    return {n: (old.get(n), new.get(n)) for n in sorted({*old, *new}) if old.get(n) != new.get(n)}


def _pin(context: CliContext, key_id: str) -> Answer:
    context.writable()
    profile = context.store.pin(key_id)
    words = "pinned: never replaced, and used for its model, machine and settings whatever the image"
    return _told(context, {"pinned": profile.key.id}, f"{profile.key.id}: {words}")


def _unpin(context: CliContext, key_id: str) -> Answer:
    profile = context.store.unpin(key_id)  # works on a full volume too: it only removes
    return _told(context, {"unpinned": profile.key.id}, f"{profile.key.id}: no longer pinned")


def _forget(context: CliContext, key_id: str) -> Answer:
    gone = context.store.forget(key_id)  # works on a full volume too: it frees space
    row = {"forgotten": gone.id, "model": gone.alias, "was_pinned": gone.was_pinned}
    of = f" of {gone.alias}" if gone.alias else ""
    return _told(context, row, f"{gone.id}{of}: forgotten{', which was pinned' if gone.was_pinned else ''}")


def _told(context: CliContext, row: dict[str, Any], words: str) -> Answer:
    return Answer(text=json.dumps(row) if context.as_json else words)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
