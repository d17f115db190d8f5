"""Parses the model that the user typed: a file on this machine, a recipe, a repository of the hub, or a URL."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from appliance.errors import ConfigError, ModelUnreadableError, UsageError
from appliance.host.docker.launch import Bind
from appliance.model_names import Meant, NamedRecipe, nearest, resolve
from appliance.reference import Reference, file_name, looks_remote, parse_reference
from appliance.values import dataclass

# Outside the volume: a bind inside of it would leave a folder there that belongs to root.
TARGET = "/models"
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
RECIPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the user's word means. `setting` is the model setting for the appliance; None leaves the choice to the
    image's recipe. `note` tells the user what else the word could mean."""

    called: str
    name: str  # name for the container
    setting: str | None
    recipe: str | None = None
    binds: tuple[Bind, ...] = ()
    note: str | None = None

    @property
    def is_here(self) -> bool:
        return bool(self.binds)


def understand(called: str, endpoint: str = "", recipes: Sequence[NamedRecipe] = ()) -> Weights:
    """Return what a word means. `endpoint` is the hub's; `recipes` are those of a clone.

    A bare word is a recipe or a model of one, or a path if it ends with .gguf. A word with a slash is a path that
    exists, else a model of a recipe after its vendor, else a repository.

    Raises ModelUnreadableError for a file that is missing or unreadable, ConfigError for a name of no recipe and for a
    reference that is malformed or contains a password, UsageError for anything else.
    """
    path = Path(called).expanduser()
    if _looks_like_a_path(called):
        return _of_path(called, path)
    meant = resolve(called, recipes)
    if RECIPE.fullmatch(called):
        if recipes and meant is None:
            raise unknown_model(called, recipes)
        return _of_meant(called, path, meant) if meant else _of_recipe(called, path)
    if "/" in called and path.exists():
        note = f"{called} is read as a path; the repository of this name is hf.co/{called}"
        return _of_path(called, path, note=note)
    if meant:
        return _of_meant(called, path, meant)
    if looks_remote(called):
        return _of_reference(parse_reference(called, endpoint))
    message = f"not a file, a recipe, org/repo[:quant] or a URL: {called!r}"
    raise UsageError(message, hint="as in `appliance run qwen`, `run ./model.gguf` or `run Qwen/Qwen3-8B-GGUF:Q4_K_M`")


def _looks_like_a_path(called: str) -> bool:
    if called.startswith(("/", ".", "~")):
        return True
    is_file_of_a_repository = called.count("/") >= 2  # a URL has as many slashes
    return called.lower().endswith(".gguf") and not is_file_of_a_repository


def _of_recipe(called: str, path: Path) -> Weights:
    recipe, _, rung = called.partition(":")
    note = f"{called} is read as a recipe; the file or folder of this name is ./{called}" if path.exists() else None
    return Weights(called=called, name=called, setting=called if rung else None, recipe=recipe.lower(), note=note)


def _of_meant(called: str, path: Path, meant: Meant) -> Weights:
    notes = [] if called.casefold() == meant.words else [f"{called} is read as the recipe {meant.words}"]
    if "/" in called:
        notes.append(f"the repository of this name is hf.co/{called}")
    elif path.exists():
        notes.append(f"the file or folder of this name is ./{called}")
    name = called.rpartition("/")[2]
    setting = meant.words if meant.rung else None
    return Weights(called=called, name=name, setting=setting, recipe=meant.recipe, note="; ".join(notes) or None)


def unknown_model(called: str, recipes: Sequence[NamedRecipe]) -> ConfigError:
    """Return the error for a name that no recipe has, with the nearest names that exist."""
    near = nearest(called, recipes)
    others = f"the recipes are {', '.join(each.name for each in recipes)}; any other model by its repository: org/repo"
    message = f"no recipe has a model of this name: {called}"
    return ConfigError(message, hint=f"perhaps you meant {' or '.join(near)}; {others}" if near else others)


def _of_reference(reference: Reference) -> Weights:
    if found := reference.artifact:
        name = f"{found.repository.rpartition('/')[2]}{f':{found.tag}' if found.tag else ''}"
        note = f"{found.host} is asked from within the container" if found.api.startswith("http://") else None
        return Weights(called=reference.text, name=name, setting=reference.text, note=note)
    name = file_name(reference.url) if reference.url else (reference.repo or "").partition("/")[2]
    words = [name, *([reference.path] if reference.path else [])]
    quant = f":{reference.quant}" if reference.quant else ""
    return Weights(called=reference.text, name=_stem("/".join(words)) + quant, setting=reference.text)


def _of_path(called: str, path: Path, *, note: str | None = None) -> Weights:
    parts = _parts(path)
    for part in parts:
        _refuse_unreadable(part)
    # A link, such as those of the hub's cache, is mounted by its content under the link's name.
    binds = tuple(Bind(source=str(part.resolve()), target=f"{TARGET}/{part.name}") for part in parts)
    return Weights(called=called, name=_stem(path.resolve().name if path.name in ("", ".", "..") else path.name),
                   setting=binds[0].target, binds=binds, note=note)  # fmt: skip


def _parts(path: Path) -> tuple[Path, ...]:
    """Return all files of a split model, first to last."""
    found = PART.search(path.name)
    if not found or path.is_dir():
        return (path,)
    count = int(found[1])
    names = [PART.sub(f"-{number:05d}-of-{count:05d}.gguf", path.name) for number in range(1, count + 1)]
    return tuple(path.with_name(name) for name in names)


def _refuse_unreadable(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            path.open("rb").close()
        elif not stat.S_ISDIR(mode):
            message = f"model is neither a file nor a folder: {path}"
            raise ModelUnreadableError(message)
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        message = f"model cannot be read: {path}: {error.strerror}"
        raise ModelUnreadableError(message, hint=f"chmod a+r {path}") from error


def _missing(path: Path) -> ModelUnreadableError:
    folder = path.parent
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, 1)
    message = f"no such model file: {path}"
    hint = f"perhaps you meant {folder / near[0]}" if near else "a path on this machine, a recipe or org/repo[:quant]"
    return ModelUnreadableError(message, hint=hint)


def _stem(name: str) -> str:
    return PART.sub("", name).removesuffix(".gguf")
