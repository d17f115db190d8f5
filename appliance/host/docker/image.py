"""The image for this machine: chosen by `python -m images select`, used if it exists, else pulled or built."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from docker.api import APIClient
from docker.errors import APIError, ImageNotFound
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from appliance.documents import load
from appliance.errors import ConfigError, FatalError
from appliance.host.docker import gpus
from appliance.host.docker.containers import CELL, RECIPE
from appliance.host.docker.gpus import HostGpu
from appliance.host.docker.inventory import CLONE
from appliance.run import Finished, RunTimeout, run, run_shown
from appliance.values import dataclass

LOCAL = "appliance"
PREFIX = "IMAGE_PREFIX"
MATRIX = "build_matrix.yaml"
ASK_S = 60.0
PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """An image by its name. `cell` and `recipe` say how to build it; None for an image that the user named."""

    reference: str
    cell: str | None = None
    recipe: str | None = None

    @property
    def can_be_pulled(self) -> bool:
        """True if the name contains a registry. Local names on a public registry belong to no one, so an image found
        there is not ours."""
        host, slash, _ = self.reference.partition("/")
        return bool(slash) and ("." in host or ":" in host or host == "localhost")

    @property
    def local_name(self) -> str | None:
        """The name that a build gives the image; None if it cannot be built."""
        if self.cell is None:
            return None
        return f"{LOCAL}/{self.recipe}:{self.cell}" if self.recipe else f"{LOCAL}:{self.cell}"

    def build_words(self) -> tuple[str, ...]:
        recipe = ("--model", self.recipe) if self.recipe else ()
        return ("-m", "images", "build", "--only", self.cell or "", "--base", "auto", *recipe)


@dataclass(frozen=True, kw_only=True)
class Image:
    reference: str
    id: str
    labels: dict[str, str]


def find(client: APIClient, reference: str) -> Image | None:
    try:
        found: dict[str, Any] = client.inspect_image(reference)  # type: ignore[no-untyped-call]
    except ImageNotFound:
        return None
    return Image(reference=reference, id=found["Id"], labels=dict(found["Config"].get("Labels") or {}))


def find_any(client: APIClient, wish: Wanted) -> Image | None:
    """Return the image of the wanted name, else of its local name, else None."""
    found = find(client, wish.reference)
    return found if found or wish.local_name is None else find(client, wish.local_name)


def wanted(
    client: APIClient,
    *,
    named: str | None,
    recipe: str | None,
    prefix: str | None,
    on_cpu: bool,
    here: Sequence[HostGpu],
) -> Wanted:
    """Return the image for this machine. `named` is --image, `prefix` the variable IMAGE_PREFIX. Raises FatalError if
    there is no image for this machine."""
    if named:
        return Wanted(reference=named)
    cell = _cell_by_program(recipe, on_cpu=on_cpu) if has_builder() else _cell_by_labels(client, here, on_cpu=on_cpu)
    base = (prefix or LOCAL).rstrip("/")
    name = f"{base}/{recipe}" if recipe else base
    return Wanted(reference=f"{name}:{cell}", cell=cell, recipe=recipe)


def of_running(reference: str, labels: Mapping[str, str], *, is_named: bool) -> Wanted:
    """Return what a newer image of a container would be. An image that the user names is never built."""
    if is_named:
        return Wanted(reference=reference)
    return Wanted(reference=reference, cell=labels.get(CELL), recipe=labels.get(RECIPE))


def has_builder() -> bool:
    """True if `python -m images` can run here, which needs a clone of the project."""
    return (CLONE / MATRIX).is_file()


def _cell_by_program(recipe: str | None, *, on_cpu: bool) -> str:
    if on_cpu:
        rows = json.loads(_asked("list", "--json").stdout)
        fits = [row["id"] for row in rows if row["cuda"] is None and _platform() in row["platforms"]]
        return str(fits[0])
    of_recipe = ("--alias", recipe, "--dry-run") if recipe else ()
    return str(json.loads(_asked("select", "--json", *of_recipe).stdout)["cell"])


def _platform() -> str:
    return PLATFORMS.get(platform.machine(), platform.machine())


def _asked(*words: str) -> Finished:
    """Run the build half as a program and return its result. Raises ConfigError with its error message if it fails."""
    argv = (sys.executable, "-m", "images", *words)
    try:
        finished = run(argv, timeout_s=ASK_S, folder=CLONE)
    except (OSError, RunTimeout) as error:
        message = f"choosing an image failed: {error}"
        raise ConfigError(message, hint="name one: --image appliance:CELL") from error
    if finished.returncode != 0:
        raise _refused(finished)
    return finished


def _refused(finished: Finished) -> FatalError:
    said, hint = _error_in(finished.stderr)
    message = f"no image can be chosen for this machine: {said}"
    return ConfigError(message, hint=hint or "name one: --image appliance:CELL")


def _error_in(stderr: str) -> tuple[str, str | None]:
    """Return the build half's error and its hint: a line of JSON if it was asked for data, else two lines of text."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("{"):
            with suppress(ValueError, KeyError):
                document = load(line)
                return str(document["error"]), document.get("hint")
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-1:]
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    return said[0] if said else "the program said nothing", hints[0] if hints else None


def _cell_by_labels(client: APIClient, here: Sequence[HostGpu], *, on_cpu: bool) -> str:
    """Choose among the images on this machine by their labels, without the build half."""
    found: dict[str, Mapping[str, str]] = {}
    for row in _cells(client):
        found[row["Labels"][CELL]] = row["Labels"]
    sms = {gpu.sm for gpu in here if gpu.sm}
    fits = [cell for cell, labels in sorted(found.items()) if _serves(labels, set() if on_cpu else sms)]
    if fits:
        return fits[-1]  # the newest CUDA, by the cell's name
    message = f"there is no image for this machine, and building one needs a clone of the project: no {CLONE / MATRIX}"
    hint = "in a clone: make up; or name an image from a registry: --image REGISTRY/NAME:TAG"
    raise ConfigError(message, hint=hint)


def _cells(client: APIClient) -> list[dict[str, Any]]:
    """Return the images of ours on this machine."""
    return [row for row in client.images(filters={"label": CELL}) if row["Labels"][CELL]]


def _serves(labels: Mapping[str, str], sms: set[str]) -> bool:
    forms = gpus.sms_of(labels.get("io.appliance.sm"))
    return any(gpus.runs_on(form, sm) for form in forms for sm in sms) if sms else not forms


def obtain(client: APIClient, wish: Wanted, err: Console, *, agrees: Callable[[str], bool]) -> Image:
    """Return the image if it exists, else pull it, else build it. `agrees` asks the user before half an hour is spent.
    Raises ConfigError."""
    found = find_any(client, wish)
    if found is None and wish.can_be_pulled:
        found = pull(client, wish.reference, err, may_fail=wish.cell is not None and has_builder())
    if found is None and wish.cell and has_builder():
        found = build(client, wish, err, agrees=agrees)
    if found is None:
        message = f"no such image here: {wish.reference}"
        known = ", ".join(sorted(tag for row in _cells(client) for tag in row["RepoTags"] or ()))
        hint = f"there are: {known}" if known else "in a clone of the project: make up"
        raise ConfigError(message, hint=hint)
    return found


def build(client: APIClient, wish: Wanted, err: Console, *, agrees: Callable[[str], bool]) -> Image:
    """Build the image under its local name; its output goes to stderr. Raises ConfigError if the user says no,
    BuildFailedError if the build fails."""
    command = " ".join(("python3", *wish.build_words()))
    if not agrees(
        f"{wish.reference} is not on this machine. Build it now? Compiling the engine takes up to half an hour"
    ):
        message = f"no such image here: {wish.reference}"
        raise ConfigError(message, hint=f"build it with --yes, or by hand: {command}")
    err.print(f"building: {command}", markup=False, soft_wrap=True)
    code = run_shown((sys.executable, *wish.build_words()), folder=CLONE)
    found = find_any(client, wish)
    if code != 0 or found is None:
        message = f"the image was not built: {command} ended with {code}"
        raise BuildFailedError(message, hint="see the build's output above")
    return found


class BuildFailedError(FatalError):
    exit_code = 60


def pull(client: APIClient, reference: str, err: Console, *, may_fail: bool) -> Image | None:
    """Pull the image. None if the pull fails and `may_fail` is set; otherwise raises ConfigError."""
    name, _, tag = reference.rpartition(":")
    try:
        _show_pull(client.pull(name, tag=tag, stream=True, decode=True), reference, err)
    except (APIError, ImageNotFound) as error:
        if may_fail:
            err.print(f"not pulled: {reference}: {error.explanation or error}", markup=False, soft_wrap=True)
            return None
        message = f"the image cannot be pulled: {reference}: {error.explanation or error}"
        raise ConfigError(message, hint="docker login, or another --image") from error
    return find(client, reference)


def _show_pull(events: Any, reference: str, err: Console) -> None:  # noqa: ANN401 - untyped in docker-py
    sizes: dict[str, tuple[int, int]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn())
    if not err.is_terminal:
        err.print(f"pulling {reference}", markup=False, soft_wrap=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(f"pulling {reference}", total=None)
        for event in events:
            if "error" in event:
                raise APIError(str(event["error"]), explanation=str(event["error"]))
            detail = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and detail.get("total"):
                sizes[event["id"]] = (detail["current"], detail["total"])
                done, total = (sum(each) for each in zip(*sizes.values(), strict=True))
                progress.update(task, completed=done, total=total)
