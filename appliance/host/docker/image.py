"""The image for this machine: used if it exists, else pulled by digest, or built if the user wants that.

In a clone `python -m images select` chooses the cell; an installed command chooses among the published images.
"""

from __future__ import annotations

import json
import platform
import re
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
from appliance.host.docker.choose import REMEDY, choose
from appliance.host.docker.containers import CELL, RECIPE
from appliance.host.docker.gpus import HostGpu
from appliance.host.docker.inventory import CLONE, Inventory, Published, load_inventory
from appliance.run import Finished, RunTimeout, run, run_shown
from appliance.values import dataclass

LOCAL = "appliance"
PREFIX = "IMAGE_PREFIX"
MATRIX = "build_matrix.yaml"
ASK_S = 60.0
PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """An image by its name. `cell` and `recipe` say how to build it; None for an image that the user named.

    `published` is the registry's image that `reference` names by digest; None for any other name.
    """

    reference: str
    cell: str | None = None
    recipe: str | None = None
    published: Published | None = None

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
    """Return the image of the wanted name, else of its local name, else None. An installed command takes a published
    image only: one of the local name may be of any age."""
    found = find(client, wish.reference)
    return found or (None if wish.published and not has_builder() else find_local(client, wish))


def find_local(client: APIClient, wish: Wanted) -> Image | None:
    return find(client, wish.local_name) if wish.local_name else None


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
    inventory = load_inventory()
    gpus_used = () if on_cpu else here
    if has_builder():
        cell = _cell_by_program(recipe, on_cpu=on_cpu)
    elif inventory and (prefix or any(each.recipe == recipe for each in inventory.published)):
        cell = _cell_by_inventory(inventory, gpus_used, recipe, only_published=not prefix)
    else:
        cell = _cell_by_labels(client, gpus_used, recipe, inventory)
    published = inventory.published_image(cell, recipe) if inventory and not prefix else None
    if published:
        return Wanted(reference=published.reference, cell=cell, recipe=recipe, published=published)
    base = (prefix or LOCAL).rstrip("/")
    name = f"{base}/{recipe}" if recipe else base
    return Wanted(reference=f"{name}:{cell}", cell=cell, recipe=recipe)


def of_running(reference: str, labels: Mapping[str, str], *, is_named: bool) -> Wanted:
    """Return what a newer image of a container would be. An image that the user names is never built."""
    if is_named:
        return Wanted(reference=reference)
    cell, recipe = labels.get(CELL), labels.get(RECIPE)
    inventory = load_inventory() if "@" in reference else None
    if inventory and cell and (published := inventory.published_image(cell, recipe)):
        return Wanted(reference=published.reference, cell=cell, recipe=recipe, published=published)
    return Wanted(reference=reference, cell=cell, recipe=recipe)


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


def _cell_by_inventory(
    inventory: Inventory, gpus_used: Sequence[HostGpu], recipe: str | None, *, only_published: bool
) -> str:
    cells = {each.cell for each in inventory.published if each.recipe == recipe}
    choices = [each for each in inventory.choices if each.cell in cells or not only_published]
    return choose(choices, gpus_used, f"linux/{_platform()}").cell


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


def _cell_by_labels(
    client: APIClient, gpus_used: Sequence[HostGpu], recipe: str | None, inventory: Inventory | None
) -> str:
    """Choose among the images on this machine by their labels: nothing that fits is published. Raises ConfigError."""
    rows = [row for row in _cells(client) if recipe in (None, row["Labels"].get(RECIPE))]
    found: dict[str, Mapping[str, str]] = {row["Labels"][CELL]: row["Labels"] for row in rows}
    sms = {gpu.sm for gpu in gpus_used if gpu.sm}
    fits = [cell for cell, labels in sorted(found.items()) if _serves(labels, sms)]
    if fits:
        return fits[-1]  # the newest CUDA, by the cell's name
    wanted_image = f"image of {recipe}" if recipe else "image"
    if inventory and inventory.published:
        others = sorted({each.recipe or "images without a recipe" for each in inventory.published})
        message = f"no {wanted_image} is published: published are {', '.join(others)}"
        raise ConfigError(message, hint=REMEDY)
    message = f"there is no {wanted_image} for this machine: none is published yet, and building needs a clone"
    raise ConfigError(message, hint=REMEDY)


def _cells(client: APIClient) -> list[dict[str, Any]]:
    """Return the images of ours on this machine."""
    return [row for row in client.images(filters={"label": CELL}) if row["Labels"][CELL]]


def _serves(labels: Mapping[str, str], sms: set[str]) -> bool:
    forms = gpus.sms_of(labels.get("io.appliance.sm"))
    return any(gpus.runs_on(form, sm) for form in forms for sm in sms) if sms else not forms


def obtain(
    client: APIClient, wish: Wanted, err: Console, *, agrees: Callable[[str], bool], builds: bool = False
) -> Image:
    """Return the image if it exists, else pull it, else build it. `agrees` asks the user before half an hour is spent;
    `builds` is True for --build, which pulls no published image. Raises ConfigError."""
    found = find_local(client, wish) if builds else find_any(client, wish)
    if found is None and wish.can_be_pulled and not (builds and wish.published):
        found = pull(client, wish, err, may_fail=wish.cell is not None and has_builder())
    if found and wish.published and found.reference == wish.reference:
        _refuse_other(found, wish.published)
    if found is None and wish.cell and has_builder():
        found = build(client, wish, err, agrees=agrees)
    if found is None:
        message = f"no such image here: {wish.reference}"
        known = ", ".join(sorted(tag for row in _cells(client) for tag in row["RepoTags"] or ()))
        hint = f"there are: {known}" if known else "in a clone of the project: make up"
        raise ConfigError(message, hint=hint)
    return found


def refuse_build_without_clone() -> None:
    """Raise ConfigError if --build cannot build."""
    if not has_builder():
        message = f"--build needs a clone of the project, and this command is installed without: no {CLONE / MATRIX}"
        raise ConfigError(message, hint="in a clone: make venv, then .venv/bin/python -m appliance run; or no --build")


def build(client: APIClient, wish: Wanted, err: Console, *, agrees: Callable[[str], bool]) -> Image:
    """Build the image under its local name; its output goes to stderr. Raises ConfigError if the user says no,
    BuildFailedError if the build fails."""
    command = " ".join(("python3", *wish.build_words()))
    if not agrees(
        f"{wish.reference} is not on this machine. Build it now? Compiling the engine takes up to half an hour"
    ):
        message = f"no such image here: {wish.reference}"
        raise ConfigError(message, hint=f"build it with --build, or by hand: {command}")
    err.print(f"building: {command}", markup=False, soft_wrap=True)
    code = run_shown((sys.executable, *wish.build_words()), folder=CLONE)
    found = find_local(client, wish)
    if code != 0 or found is None:
        message = f"the image was not built: {command} ended with {code}"
        raise BuildFailedError(message, hint="see the build's output above")
    return found


class BuildFailedError(FatalError):
    exit_code = 60


class TamperedImageError(FatalError):
    """The registry's answer is not the image of the published digest."""

    exit_code = 61


# Docker's words for content that is not of the digest that was asked for, by either of its image stores.
OTHER_DIGEST = re.compile(r"unexpected commit digest|digest verification|manifest verification failed|digest mismatch")


def pull(client: APIClient, wish: Wanted, err: Console, *, may_fail: bool) -> Image | None:
    """Pull the image. None if the pull fails and `may_fail` is set. Raises TamperedImageError if it is another image
    than the published one, ConfigError if it cannot be pulled."""
    reference = wish.reference
    name, _, tag = reference.rpartition("@" if "@" in reference else ":")
    size = f" ({wish.published.compressed_bytes / 1e6:.0f} MB)" if wish.published else ""
    err.print(f"pulling {reference}{size}", markup=False, soft_wrap=True)
    try:
        _show_pull(client.pull(name, tag=tag, stream=True, decode=True), err)
    except (APIError, ImageNotFound) as error:
        said = " ".join(str(error.explanation or error).split())
        if OTHER_DIGEST.search(said):
            raise _tampered(reference, said) from error
        if may_fail:
            err.print(f"not pulled: {reference}: {said}", markup=False, soft_wrap=True)
            return None
        message = f"the image cannot be pulled: {reference}: {said}"
        local = find_local(client, wish)
        other = f"the image of this machine: --image {local.reference}" if local else "another --image"
        raise ConfigError(message, hint=f"docker login, or {other}") from error
    return find(client, reference)


def _refuse_other(found: Image, published: Published) -> None:
    """Refuse an image whose labels are not those of its row: the row names the digest of something else."""
    made = (found.labels.get(CELL), found.labels.get(RECIPE))
    if made != (published.cell, published.recipe):
        said = f"it is {made[1] or 'no recipe'} on {made[0] or 'no cell'}, not {published.recipe or 'no recipe'} on "
        raise _tampered(published.reference, said + published.cell)


def _tampered(reference: str, said: str) -> TamperedImageError:
    message = f"the registry's image is not the published one: {reference}: {said}"
    return TamperedImageError(message, hint="do not use this registry or mirror; report it to who publishes the images")


def _show_pull(events: Any, err: Console) -> None:  # noqa: ANN401 - untyped in docker-py
    sizes: dict[str, tuple[int, int]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("pulling", total=None)
        for event in events:
            if "error" in event:
                raise APIError(str(event["error"]), explanation=str(event["error"]))
            detail = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and detail.get("total"):
                sizes[event["id"]] = (detail["current"], detail["total"])
                done, total = (sum(each) for each in zip(*sizes.values(), strict=True))
                progress.update(task, completed=done, total=total)
