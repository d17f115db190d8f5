"""Resolve a reference to its files. The hub is asked for a listing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

from appliance.errors import ConfigError, DownloadError
from appliance.reference import Reference, file_name, parse_reference
from appliance.settings import HubSettings
from appliance.system.detached import detached
from appliance.values import dataclass
from appliance.weights.cache.download_set import Wanted, WantedFile, folder_of_repo, folder_of_url, short_hash
from appliance.weights.cache.quants import GgufSet, folder_files, gguf_sets, pick, projector_of
from appliance.weights.cache.size import as_size
from appliance.weights.download.fetch import ignore, offline_error
from appliance.weights.download.ranges import open_range, open_session
from appliance.weights.download.registry import resolve_artifact
from appliance.weights.download.retry import Patience, Transient, patiently

_HEADER_STEP_BYTES = 4 * 2**20
_HEADER_LIMIT_BYTES = 64 * 2**20  # the same as in the header reader


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One model of a repository: a quantization, or a safetensors folder with the label "safetensors"."""

    label: str
    wanted: Wanted


async def resolve(
    text: str,
    hub: HubSettings,
    *,
    is_folder: bool = False,
    sha256: str | None = None,
    on_wait: Callable[[str], None] = ignore,
) -> Wanted:
    """Return the files that `text` means now. `is_folder` is True if the engine serves safetensors folders.

    `sha256` is the required hash of a plain URL's file. Raises ConfigError with near misses if nothing matches,
    DownloadError if the network or the hub refuses.
    """
    reference = parse_reference(text, hub.endpoint)
    if hub.offline:
        raise offline_error(text)
    if reference.url:
        return await _of_url(reference.url, sha256, hub, on_wait)
    if sha256:
        message = f"--sha256 is only for plain URLs, hubs and registries have their own hashes: {text}"
        raise ConfigError(message, hint="remove --sha256")
    if reference.artifact:
        return await resolve_artifact(text, reference.artifact, hub, is_folder=is_folder, on_wait=on_wait)
    offered = await offers(reference, hub, is_folder=is_folder, on_wait=on_wait)
    return _chosen(reference, offered)


async def offers(
    reference: Reference, hub: HubSettings, *, is_folder: bool = False, on_wait: Callable[[str], None] = ignore
) -> tuple[Offer, ...]:
    """Return all models of one format in the repository, at one commit. Raises ConfigError if there are none."""
    everything = await list_repo(reference, hub, on_wait)
    paths = [file.path for file in everything.files]
    if is_folder:
        found = [("safetensors", folder_files(paths))]
    else:
        projector = projector_of(paths)
        more = (projector,) if projector else ()
        found = [(each.label, (*each.paths, *more)) for each in gguf_sets(paths) if not each.missing]
    offered = tuple(Offer(label=label, wanted=only(everything, names)) for label, names in found if names)
    return offered or _refuse(reference, paths, "a folder of safetensors" if is_folder else "a whole GGUF model")


async def list_repo(reference: Reference, hub: HubSettings, on_wait: Callable[[str], None] = ignore) -> Wanted:
    """List all files of a repository at the commit that its revision points to now."""
    # here: importing it takes 0.2 s of a start, and only a reference to the hub needs it
    from appliance.weights.download.listing import list_files

    repo = reference.repo or ""

    async def ask() -> Wanted:
        listing = await detached(lambda: list_files(repo, reference.revision, hub))
        files = tuple(
            WantedFile(
                path=file.path,
                bytes=file.bytes,
                sha256=file.sha256,
                git_sha1=file.git_sha1,
                url=url_of(hub.endpoint, repo, listing.commit, file.path),
            )
            for file in listing.files
        )
        ref = reference.revision or "main"
        return Wanted(
            repo=repo, revision=listing.commit, folder=folder_of_repo(repo), files=files, name=reference.text, ref=ref
        )

    return await patiently(ask, Patience(hub.patience_s), repo, on_wait)


def only(wanted: Wanted, paths: Sequence[str]) -> Wanted:
    """Restrict `wanted` to these files, in this order."""
    by_path = {file.path: file for file in wanted.files}
    return replace(wanted, files=tuple(by_path[path] for path in paths))


def _refuse(reference: Reference, paths: Sequence[str], what: str) -> tuple[Offer, ...]:
    has_other = any(path.endswith((".gguf", ".safetensors")) for path in paths)
    words = "; it has weights of another format" if has_other else f"; it has {len(paths)} files, no weights"
    message = f"repository has nothing that this image serves ({what}): {reference.repo}{words}"
    raise ConfigError(message, hint="name a repository of GGUF files (often …-GGUF), or use the other engine's image")


def _chosen(reference: Reference, offered: tuple[Offer, ...]) -> Wanted:
    if reference.path:
        return _with_path(reference, reference.path, offered)
    if len(offered) == 1 and not reference.quant:
        return offered[0].wanted
    by_paths = {tuple(file.path for file in each.wanted.files): each.wanted for each in offered}
    sets = [GgufSet(label=each.label, paths=paths) for each, paths in zip(offered, by_paths, strict=True)]
    picked = pick(sets, reference.quant, reference.repo or "", lambda each: _size(by_paths[each.paths]))
    return by_paths[picked.paths]


def _size(wanted: Wanted) -> str:
    return as_size(wanted.bytes) if wanted.bytes is not None else ""


def _with_path(reference: Reference, path: str, offered: tuple[Offer, ...]) -> Wanted:
    paths = [file.path for each in offered for file in each.wanted.files]
    for each in offered:
        if path in (file.path for file in each.wanted.files):
            return each.wanted
    near = difflib.get_close_matches(path, paths, 1, 0.5)
    message = f"no such file in {reference.repo}: {path}"
    hint = f"perhaps you meant {reference.repo}/{near[0]}" if near else f"it has {', '.join(paths[:8])}"
    raise ConfigError(message, hint=hint)


def url_of(endpoint: str, repo: str, revision: str, path: str) -> str:
    return f"{endpoint}/{repo}/resolve/{quote(revision, safe='')}/{quote(path)}"


async def _of_url(url: str, sha256: str | None, hub: HubSettings, on_wait: Callable[[str], None]) -> Wanted:
    """Ask for one byte, which shows size and validator. Together with the address they replace a commit."""
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        message = f"not a sha256: '{sha256}' (flag --sha256)"
        raise ConfigError(message, hint="64 digits from 0 to f, as `sha256sum FILE` prints")
    asked = WantedFile(path=file_name(url), bytes=None, sha256=sha256.lower() if sha256 else None, url=url)

    async def ask() -> tuple[int | None, str | None]:
        async with open_session() as session, open_range(session, asked, 0, hub, end=1) as answer:
            return answer.total, answer.validator

    size, validator = await patiently(ask, Patience(hub.patience_s), url, on_wait)
    file = WantedFile(path=asked.path, bytes=size, sha256=asked.sha256, url=url, validator=validator)
    return Wanted(
        repo=None,
        revision=short_hash(file.key, 40),
        folder=folder_of_url(url, urlsplit(url).hostname or ""),
        files=(file,),
        name=url,
        ref="main",
    )


async def read_remote_header(
    file: WantedFile, hub: HubSettings, into: Path, is_enough: Callable[[Path, int], bool]
) -> Path:
    """Read the beginning of a remote file: `into` gets the file's size and its first bytes, the rest is a hole.

    `is_enough` is called with the number of real bytes after each step of 4 MiB. Raises DownloadError if 64 MiB are
    not enough.
    """
    real = 0
    patience = Patience(hub.patience_s)
    limit = min(file.bytes or _HEADER_LIMIT_BYTES, _HEADER_LIMIT_BYTES)
    with into.open("wb") as out:
        while real < limit:
            end = min(real + _HEADER_STEP_BYTES, limit)
            data = await patiently(partial(_bytes, file, hub, real, end), patience, file.path, ignore)
            out.write(data)
            real += len(data)
            out.truncate(max(real, file.bytes or 0))
            out.flush()
            if is_enough(into, real):
                return into
    message = f"header of a remote file cannot be parsed: {file.path}: {real:,} bytes were read"
    raise DownloadError(message, hint="fetch the whole file, which shows the error: `appliance models pull`")


async def _bytes(file: WantedFile, hub: HubSettings, begin: int, end: int) -> bytes:
    data = b""
    async with open_session() as session, open_range(session, file, begin, hub, end=end) as answer:
        if answer.begin not in (0, begin):
            message = f"the server sent another range than from byte {begin:,}"
            raise Transient(message)
        while len(data) < end - answer.begin and (chunk := await answer.content.readany()):
            data += chunk
    data = data[begin - answer.begin : end - answer.begin]
    if len(data) < end - begin:
        message = f"the connection ended at byte {begin + len(data):,}"
        raise Transient(message)
    return data
