"""`appliance models ACTION`: each action prints its result and raises FatalError if it fails."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError, DownloadError, ModelUnreadableError, UsageError, printable
from appliance.image_facts import folders_by_hand, parse_recipe
from appliance.settings import HubSettings, Settings
from appliance.system.saved_prompts import remove_of_models
from appliance.values import dataclass
from appliance.volume import add_model, drop_unfinished, is_held, open_volume, refusal
from appliance.weights.cache.size import as_size
from appliance.weights.download.disk_space import size_of
from appliance.weights.show import Counted
from appliance.weights.stores.import_files import bring, sources_of
from appliance.weights.stores.inventory import view
from appliance.weights.stores.remove import blob_of, remove
from appliance.weights.stores.stores import (
    StoredModel,
    ambiguous,
    find_stored,
    lies_below,
    list_store,
    model_at,
    other_stores,
    volume_store,
)
from appliance.weights.stores.verify import Checked, set_aside, verify


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line's arguments."""

    settings: Settings
    name: str | None
    # returns the recipe's files on the volume for `name`, by model name
    of_recipe: Callable[[], Sequence[tuple[str, Path]]] = tuple
    # returns the states of models in the running appliance, by the paths of their weights; empty if none runs
    serving: Callable[[], Mapping[Path, str]] = dict
    sha256: str | None = None
    as_json: bool = False
    repairs: bool = False
    target: str | None = None  # where to push
    hub: Callable[[], HubSettings] | None = None  # needed for push


def run(action: str, request: Request) -> int:
    """Run an action and return the exit code. Raises UsageError if it needs a name and has none."""
    if request.name is None and action not in _WITHOUT_NAME:
        message = f"models {action} needs a {'path or a name' if action == 'import' else 'file name'}"
        raise UsageError(message, hint=f"for example `appliance models {action} {_EXAMPLES.get(action, 'model.gguf')}`")
    return ACTIONS[action](request)


def _list(request: Request) -> int:
    found = view(request.settings, request.serving())
    print(json.dumps(found.as_document(), indent=1) if request.as_json else found.as_text())
    return 0


def _add(request: Request) -> int:
    with _writing(request.settings):
        print(add_model(request.settings.models_dir, request.name or "", sys.stdin.buffer, request.sha256))
    return 0


def _remove(request: Request) -> int:
    # Works on a full volume too: it frees space.
    removed = remove(request.name or "", request.settings, lambda: _of_recipe(request))
    try:
        remove_of_models(request.settings.prompts_dir, removed.models)
    except OSError as error:
        raise refusal(request.settings.prompts_dir, error) from error
    row = {"removed": removed.name, "files": list(map(str, removed.files)), "freed_bytes": removed.freed_bytes}
    _tell(request, row, f"{printable(removed.name)}: removed, {as_size(removed.freed_bytes)} freed")
    return 0


def _push(request: Request) -> int:
    from appliance.weights.push import push  # here: it costs 0.1 s, and no other action needs the network

    if request.target is None or request.hub is None:
        message = "models push needs a model and where to push it"
        raise UsageError(message, hint=f"for example `appliance models push {_EXAMPLES['push']}`")
    found = wanted_models(request)
    if len(found) > 1:
        raise ambiguous(request.name or "", [model.name for model in found])
    pushed = push(found[0], request.target, request.hub())
    _tell(request, pushed.document(), pushed.describe())
    return 0


def _import(request: Request) -> int:
    settings = request.settings
    models = sources_of(request.name or "", settings)
    if request.sha256 and sum(len(model.files) + bool(model.projector) for model in models) != 1:
        message = "--sha256 is for one file, and this model has several"
        raise UsageError(message, hint="import the files one by one, or omit --sha256: each hash is shown")
    meter = Counted("importing", sum(model.bytes for model in models))
    with _writing(settings):
        try:
            done = bring(models, settings, meter, request.sha256)
        finally:
            meter.end()
    rows = [
        {"name": one.name, "file": str(one.file), "bytes": one.bytes, "sha256": one.sha256, "how": one.how}
        for one in done
    ]
    lines = [
        f"{printable(one.name)}: {one.how}, {one.bytes:,} bytes, sha256 {one.sha256} ({printable(one.file.name)})"
        for one in done
    ]
    _tell(request, rows, "\n".join(lines))
    return 0


def _verify(request: Request) -> int:
    models = wanted_models(request)
    meter = Counted("verifying", sum(model.bytes for model in models))
    known, found = _known(request.settings), []
    for model in models:
        for checked in verify(model, known, meter):
            meter.end()
            found.append(checked)
            if not request.as_json:
                print(_said(checked), flush=True)
    damaged = [checked for checked in found if checked.state == "damaged"]
    aside = [_aside(checked, request) for checked in damaged] if request.repairs else []
    if request.as_json:
        print(json.dumps([checked.as_document() for checked in found], indent=1))
    elif not found:
        print(f"no models in {request.settings.models_dir}")
    if damaged:
        raise _damage(damaged, len(found), any(aside))
    if closed := [checked for checked in found if checked.state == "unreadable"]:
        message = f"{len(closed)} of {len(found)} files are not readable: {printable(str(closed[0].file))}"
        raise ModelUnreadableError(message, hint="run the command as the files' owner, or as a user of their group")
    return 0


def wanted_models(request: Request) -> Sequence[StoredModel]:
    """Return the models of that name. Without one, all of the volume: reading other tools' folders could take hours.
    Raises ConfigError if no model has the name."""
    volume = volume_store(request.settings.models_dir)
    if request.name is None:
        listing = list_store(volume)
        if listing.problem and not listing.models:
            raise ModelUnreadableError(listing.problem)
        if listing.problem:
            print(f"warning: {listing.problem}", file=sys.stderr)
        return listing.models
    found = find_stored(request.name, [volume]) or _of_recipe(request)
    if not found and not (found := find_stored(request.name, other_stores(request.settings))):
        message = f"no such model: {printable(request.name)}"
        raise ConfigError(message, hint="`appliance models list` lists the models")
    return found


def _of_recipe(request: Request) -> tuple[StoredModel, ...]:
    """Return the recipe's models for the name. If the recipe has none, another tool's folder may have it: Ollama's
    `qwen:7b`."""
    stores = [volume_store(request.settings.models_dir), *other_stores(request.settings)]
    try:
        return tuple(model_at(path, name, stores) for name, path in request.of_recipe())
    except ConfigError:
        if find_stored(request.name or "", stores):
            return ()
        raise


def _known(settings: Settings) -> dict[str, str]:
    """Return sha256 by path for the recipe's files. Only paths that a start accepts: other files of that name are
    the user's own."""
    try:
        recipe = parse_recipe((settings.facts_dir / "recipe.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # not a model image, so no hash is known
    files = [(rung, file) for rung in recipe.rungs for file in rung.files]
    models = settings.models_dir
    known = {str(models / rung.place(file)): file.sha256 for rung, file in files}
    flat = [(rung, file) for rung, file in files if rung.format == "gguf"]
    put = [(top / file.path, file) for rung, file in flat for top in folders_by_hand(models, rung.repo)]
    return known | {str(path): file.sha256 for path, file in put if size_of(path) == file.bytes}


def _said(checked: Checked) -> str:
    found = f", sha256 {checked.found}" if checked.found else ""
    words = {
        "sound": f"sound{found}",
        "unknown": f"readable{found}; its expected hash is unknown",
        "damaged": f"damaged: {checked.reason}",
        "unreadable": f"not checked: {checked.reason}",
    }
    return printable(f"{checked.model}: {checked.file.name}: {words[checked.state]}")


def _aside(checked: Checked, request: Request) -> bool:
    """Set a damaged file aside. Returns False if it is in another tool's folder, missing, or being served."""
    if not lies_below(checked.file, request.settings.models_dir) or not checked.file.exists():
        return False
    if is_held(blob_of(checked.file) or checked.file):
        print(f"{printable(checked.file.name)}: kept in place, because it is being served", file=sys.stderr)
        return False
    try:
        aside = set_aside(checked)
    except OSError as error:
        raise refusal(request.settings.models_dir, error) from error
    print(f"{printable(checked.file.name)}: set aside as {printable(str(aside))}", file=sys.stderr)
    return True


def _damage(damaged: Sequence[Checked], count: int, is_aside: bool) -> DownloadError:
    first = damaged[0]
    message = f"{len(damaged)} of {count} files are damaged: {printable(f'{first.model}: {first.reason}')}"
    again = f"fetch it again: `appliance models pull {printable(first.model)}`, or add the file again"
    return DownloadError(message, hint=again if is_aside else f"`models verify --repair` sets it aside; then {again}")


@contextmanager
def _writing(settings: Settings) -> Iterator[None]:
    # By default SIGTERM, with which Docker stops a container, would leave the unfinished file on the volume.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        drop_unfinished(settings.models_dir)  # first: they may be what fills the volume
        open_volume(settings.data_dir)
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(request: Request, document: Any, text: str) -> None:  # noqa: ANN401 - JSON
    print(json.dumps(document) if request.as_json else text)


ACTIONS: Mapping[str, Callable[[Request], int]] = {
    "list": _list,
    "add": _add,
    "rm": _remove,
    "remove": _remove,
    "verify": _verify,
    "import": _import,
    "push": _push,
}
_EXAMPLES = {"import": "qwen3:4b", "pull": "org/repo:Q4_K_M", "push": "model.gguf oci://registry.example/team/model:q4"}
_WITHOUT_NAME = frozenset({"list", "verify"})
