"""A recipe's variant as files to fetch. Asks no network, and imports nothing that could."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

from appliance.errors import ConfigError
from appliance.image_facts import RecipeFile, Rung
from appliance.settings import HubSettings
from appliance.weights.cache.download_set import Wanted, WantedFile, folder_of_repo, folder_of_url, short_hash


def of_rung(rung: Rung, hub: HubSettings, name: str | None = None) -> Wanted:
    """Return the files of a variant; `name` is the user's name for it. Raises ConfigError (10) if it has no address."""
    called = name or rung.name
    if rung.repo and rung.revision:
        base = f"{hub.endpoint}/{rung.repo}/resolve/{quote(rung.revision, safe='')}"
        files = tuple(_file(file, f"{base}/{quote(file.path)}") for file in rung.files)
        folder = folder_of_repo(rung.repo)
        return Wanted(repo=rung.repo, revision=rung.revision, folder=folder, files=files, name=called)
    if rung.url:
        folder = folder_of_url(rung.url, urlsplit(rung.url).hostname or "")
        file = _file(rung.files[0], rung.url)
        return Wanted(repo=None, revision=short_hash(file.key, 40), folder=folder, files=(file,), name=called)
    message = f"weights of this image's recipe are not on the volume, and it has no address for them: {called}"
    raise ConfigError(message, hint=f"put {rung.files[0].path} into models/ of the volume, or name another model")


def _file(file: RecipeFile, url: str) -> WantedFile:
    return WantedFile(path=file.path, bytes=file.bytes, sha256=file.sha256, url=url)
