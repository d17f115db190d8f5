"""The only module that imports huggingface_hub: lists a repository's files, its commit and who may read it.

One call per listing, so that its sizes and hashes are all of one commit. Nothing is downloaded with huggingface_hub:
its download begins at zero after a kill (2.4.0, file_download.py, _download_to_tmp_and_move). Imported only when
needed.
"""

from __future__ import annotations

import difflib
import re
import time
from typing import NoReturn

import httpx2
from huggingface_hub import HfApi, constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils._http import default_client_factory

from appliance.errors import ConfigError, DownloadError
from appliance.reference import is_safe_path
from appliance.settings import HubSettings
from appliance.values import dataclass
from appliance.weights.download.ranges import is_untrusted, refusal_hint, tls_context, untrusted
from appliance.weights.download.retry import PASSING, Transient, parse_retry_after

TIMEOUT_S = 20.0
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SIZE_LIMIT = 2**50
_SIMILAR = 200  # names requested from the hub to find a near miss


@dataclass(frozen=True, kw_only=True)
class ListedFile:
    """File in a listing. Small files that the hub keeps in git have no sha256."""

    path: str
    bytes: int | None
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True, kw_only=True)
class Listing:
    repo: str
    commit: str
    files: tuple[ListedFile, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.files)


def list_files(repo: str, revision: str | None, hub: HubSettings) -> Listing:
    """List a repository in one attempt; blocks up to TIMEOUT_S. Raises Transient for temporary errors, FatalError
    for others."""
    api = _api(hub)
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except HfHubHTTPError as error:
        _refuse(error, repo, revision, hub, api)
    except HFValidationError as error:
        message = f"not a repository name: {repo}: {' '.join(str(error).split())}"
        raise ConfigError(message, hint="write it as org/repo") from error
    except OfflineModeIsEnabled as error:
        message = f"offline mode is on, the hub cannot be asked: {repo}"
        raise DownloadError(message, hint="HF_HUB_OFFLINE is set: unset it, or name a model of the volume") from error
    except httpx2.TransportError as error:
        if is_untrusted(error):
            raise untrusted(repo, hub.endpoint, error) from error
        message = f"{hub.endpoint} cannot be reached: {str(error).lower()}"
        is_unreached = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        raise Transient(message, is_unreached=is_unreached) from error
    if not info.sha or not _COMMIT.fullmatch(info.sha):
        message = f"{hub.endpoint} did not send the commit of {repo}"
        raise DownloadError(message, hint="the server does not speak the hub's protocol: check HF_ENDPOINT")
    files = tuple(_listed(each) for each in info.siblings or () if is_safe_path(each.rfilename))
    return Listing(repo=repo, commit=info.sha, files=files)


def _api(hub: HubSettings) -> HfApi:
    """Return an API client with our token only, for this endpoint only; the library must not find one by itself."""
    constants.HF_HUB_DISABLE_XET = True
    set_client_factory(_client)
    return HfApi(endpoint=hub.endpoint, token=hub.token or False, library_name="appliance")


def _client() -> httpx2.Client:
    """Return the library's HTTP client with the certificates that downloads use."""
    hooks = default_client_factory().event_hooks
    return httpx2.Client(event_hooks=hooks, follow_redirects=True, timeout=TIMEOUT_S, verify=tls_context())


def _listed(sibling: RepoSibling) -> ListedFile:
    """Convert one entry. For a file in LFS or Xet, `blob_id` is the hash of the pointer. Hashes become file names,
    so anything else is refused."""
    sha256, git_sha1 = (sibling.lfs.sha256, None) if sibling.lfs else (None, sibling.blob_id)
    if not _HASH.fullmatch(sha256 or git_sha1 or "") or not 0 <= (sibling.size or 0) < _SIZE_LIMIT:
        message = f"listing of the hub cannot be parsed: {sibling.rfilename}: hash {sha256 or git_sha1!r:.80}"
        raise DownloadError(message, hint="check HF_ENDPOINT: a mirror may not send hashes, which are required")
    return ListedFile(path=sibling.rfilename, bytes=sibling.size, sha256=sha256, git_sha1=git_sha1)


def _refuse(error: HfHubHTTPError, repo: str, revision: str | None, hub: HubSettings, api: HfApi) -> NoReturn:
    status, code = error.response.status_code, error.response.headers.get("X-Error-Code", "")
    page = f"{hub.endpoint}/{repo}"
    if status in PASSING:
        words = f"{hub.endpoint} answers {status}"
        wait = parse_retry_after(error.response.headers.get("Retry-After"), time.time())
        raise Transient(words, wait) from error
    if code == "RevisionNotFound":
        message = f"no such revision of {repo}: {revision}"
        raise ConfigError(message, hint=f"{page}/commits/main lists them; without @ the newest is taken") from error
    if code == "GatedRepo" or status == 403:
        message = f"repository cannot be read: {repo}: {hub.endpoint} answers {status}, {_account(hub)}"
        raise DownloadError(message, hint=refusal_hint(403, page)) from error
    if status in (401, 404):
        message = f"repository is private or does not exist at {hub.endpoint}, {_account(hub)}: {repo}"
        raise ConfigError(message, hint=_near_miss(repo, api)) from error
    message = f"repository cannot be listed: {repo}: {hub.endpoint} answers {status}"
    raise DownloadError(message, hint=refusal_hint(status, page)) from error


def _account(hub: HubSettings) -> str:
    return "with the token of HF_TOKEN" if hub.token else "without a token"


def _near_miss(repo: str, api: HfApi) -> str:
    """Ask the hub for similar names. An error here is ignored: the first error is reported."""
    owner, _, name = repo.partition("/")
    otherwise = "check its name; for a private repository set HF_TOKEN"
    try:
        names = [each.id for each in api.list_models(author=owner, limit=_SIMILAR)]
        names += [each.id for each in api.list_models(search=name, limit=20)]
    except (HfHubHTTPError, httpx2.TransportError, ValueError):
        return otherwise
    folded = {each.casefold(): each for each in names}
    near = difflib.get_close_matches(repo.casefold(), folded, 1)
    return f"perhaps you meant {folded[near[0]]}" if near else otherwise
