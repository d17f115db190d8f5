"""What a user may call a model, and what is refused."""

from __future__ import annotations

import re
import string
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from appliance.errors import ConfigError
from appliance.reference import Reference, artifact_of_folder, file_name, is_safe_path, looks_remote, parse_reference

WORDS = st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)
HUB = "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo", {}),
        ("hf.co/org/repo:Q8_0", {"quant": "Q8_0"}),
        ("hf://org/repo", {}),
        ("huggingface.co/org/repo", {}),
        ("org/repo:UD-Q4_K_XL", {"quant": "UD-Q4_K_XL"}),
        ("org/repo@v1.0", {"revision": "v1.0"}),
        ("org/repo@refs/pr/3", {"revision": "refs/pr/3"}),
        ("org/repo@main:Q4_0", {"revision": "main", "quant": "Q4_0"}),
        ("org/repo:Q4_0@main", {"revision": "main", "quant": "Q4_0"}),
        ("org/repo/sub/file-00001-of-00002.gguf", {"path": "sub/file-00001-of-00002.gguf"}),
        ("https://huggingface.co/org/repo", {}),
        ("https://huggingface.co/org/repo/", {}),
        ("https://huggingface.co/org/repo/tree/dev", {"revision": "dev"}),
        ("https://huggingface.co/org/repo/blob/main/a.gguf", {"revision": "main", "path": "a.gguf"}),
        ("https://hf.co/org/repo/resolve/main/a%20b.gguf?download=true", {"revision": "main", "path": "a b.gguf"}),
        (f"{HUB}/org/repo/resolve/main/a.gguf", {"revision": "main", "path": "a.gguf"}),
    ],
)
def test_a_repository(text: str, expected: dict[str, Any]) -> None:
    assert parse_reference(text, HUB) == Reference(text=text, repo="org/repo", **expected)


@pytest.mark.parametrize("text", ["https://example.com/models/a.gguf", "http://10.0.0.1:8000/a.gguf?x=1"])
def test_a_plain_address(text: str) -> None:
    assert parse_reference(text, HUB) == Reference(text=text, url=text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("repo", "it is not org/repo"),
        ("org/", "it is not org/repo"),
        ("/repo", "it is not org/repo"),
        ("org/re--po", "it is not org/repo"),
        ("org/..", "it is not org/repo"),
        ("org/repo/../../etc/passwd.gguf", "is not the path of a GGUF file"),
        ("org/repo/file.bin", "is not the path of a GGUF file"),
        ("org/repo/a.gguf:Q4_0", "it names a file and a quantization"),
        ("org/repo:", "'' is not a quantization"),
        ("org/repo@", "'' is not a revision"),
        ("org/repo@../x", "is not a revision"),
        ("ftp://host/a.gguf", "the scheme ftp is unknown"),
        ("https://user:secret@host/a.gguf", "a password in a URL ends in logs"),
        ("https://host/", "its path names no file"),
        ("https:///a.gguf", "it names no host"),
        ("https://host:99999999/a.gguf", "port"),
        ("org/re\npo", "it is not org/repo"),
    ],
)
def test_what_is_no_reference(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_reference(text, HUB)
    assert caught.value.exit_code == 10
    assert "secret" not in caught.value.message
    assert "\n" not in caught.value.message
    assert "org/repo:Q4_K_M" in str(caught.value.hint)


HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "name", "manifest"),
    [
        ("oci://ghcr.io/org/model:Q4", "oci://ghcr.io/org/model:Q4", "https://ghcr.io/v2/org/model"),
        ("docker://ai/qwen3", "oci://docker.io/ai/qwen3:latest", "https://registry-1.docker.io/v2/ai/qwen3"),
        (
            "oci://smollm2:360M",
            "oci://docker.io/library/smollm2:360M",
            "https://registry-1.docker.io/v2/library/smollm2",
        ),
        ("OCI://index.docker.io/ai/m", "oci://docker.io/ai/m:latest", "https://registry-1.docker.io/v2/ai/m"),
        ("oci://localhost/m", "oci://localhost/m:latest", "http://localhost/v2/m"),
        ("oci://127.0.0.1:5000/a/b/c:1.0", "oci://127.0.0.1:5000/a/b/c:1.0", "http://127.0.0.1:5000/v2/a/b/c"),
        ("oci://[::1]:5000/m:t", "oci://[::1]:5000/m:t", "http://[::1]:5000/v2/m"),
        ("oci://127.evil.example/m:t", "oci://127.evil.example/m:t", "https://127.evil.example/v2/m"),
        ("oci://10.0.0.1:5000/m:t", "oci://10.0.0.1:5000/m:t", "https://10.0.0.1:5000/v2/m"),
        (f"oci://h.example/m:t@sha256:{HEX}", f"oci://h.example/m@sha256:{HEX}", "https://h.example/v2/m"),
    ],
)
def test_artifacts_of_registries(text: str, name: str, manifest: str) -> None:
    """Plain HTTP only to this machine; Docker Hub only where no host is named."""
    found = parse_reference(text).artifact
    assert found is not None
    assert (found.name, found.api) == (name, manifest)
    assert parse_reference(name).artifact == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("oci://", "'library/' is not a repository"),
        ("oci://ghcr.io/Org/model", "'Org/model' is not a repository of a registry, which has lower-case letters"),
        ("oci://ghcr.io/org/../x", "is not a repository"),
        ("oci://ghcr.io/org/m:", "'' is not a tag"),
        ("oci://ghcr.io/org/m:a/b", "'a/b' is not a tag"),
        ("oci://ghcr.io/org/m@sha256:12", "'sha256:12' is not a digest"),
        ("oci://gh_cr.io/org/m", "'gh_cr.io' is not the host of a registry"),
        ("oci://me:secret@ghcr.io/org/m", "a password in a URL ends in logs"),
        (f"oci://ghcr.io/{'a' * 240}", "it is longer than 240 bytes"),
        ("oci-archive:///tmp/x.tar", "artifacts of a local store are not read"),
        ("ghcr.io/org/m:latest", "address of a container registry has no scheme"),
    ],
)
def test_what_is_no_artifact(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        parse_reference(text)
    assert "secret" not in caught.value.message
    assert "oci://" in str(caught.value.hint)


HOSTS = st.from_regex(r"[a-z0-9]+(-{1,3}[a-z0-9]+){0,2}\.[a-z]{2,6}(:[0-9]{1,5})?", fullmatch=True)
REPOSITORIES = st.from_regex(
    r"[a-z0-9]+((\.|_|__|-{1,3})[a-z0-9]+){0,2}(/[a-z0-9]+(-{1,3}[a-z0-9]+)?){0,2}", fullmatch=True
)
TAGS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,9}", fullmatch=True)


@given(HOSTS, REPOSITORIES, TAGS)
def test_the_folder_of_an_artifact_says_which_one_it_is(host: str, repository: str, tag: str) -> None:
    """No two artifacts share a folder, and none has that of a repository of the hub."""
    name = f"oci://{host}/{repository}:{tag}"
    found = parse_reference(name).artifact
    assume(found is not None and found.host == host)
    assert found is not None
    assert artifact_of_folder(found.folder) == name
    assert "/" not in found.folder
    assert found.folder.count("--") > 1


@pytest.mark.parametrize("folder", ["oci--tiny", "org--name", "url--host--0123456789ab"])
def test_other_folders_are_no_artifacts(folder: str) -> None:
    assert artifact_of_folder(folder) is None


@given(WORDS, WORDS, st.none() | WORDS, st.none() | WORDS)
def test_every_repository_comes_back(org: str, name: str, quant: str | None, revision: str | None) -> None:
    text = f"{org}/{name}" + (f":{quant}" if quant else "") + (f"@{revision}" if revision else "")
    assert parse_reference(text) == Reference(text=text, repo=f"{org}/{name}", quant=quant, revision=revision)


@given(st.text(max_size=60))
def test_any_text_is_understood_or_refused(text: str) -> None:
    """What is understood can become a folder's and a file's name."""
    try:
        found = parse_reference(text)
    except ConfigError:
        return
    assert [found.repo, found.url, found.artifact].count(None) == 2
    assert found.artifact is None or is_safe_path(found.artifact.folder)
    assert found.path is None or is_safe_path(found.path)
    assert found.url is None or is_safe_path(file_name(found.url))
    assert ".." not in (found.repo or "")


@pytest.mark.parametrize(
    ("path", "is_safe"),
    [("a", True), ("a/b.gguf", True), ("", False), ("/a", False), ("../a", False), ("a/../b", False), ("a//b", False),
     ("a/./b", False), ("a\nb", False), ("a\\b", False), (".", False)],
)  # fmt: skip
def test_paths_of_a_listing(path: str, is_safe: bool) -> None:
    assert is_safe_path(path) == is_safe


def test_what_may_be_elsewhere() -> None:
    assert all(looks_remote(text) for text in ("org/repo", "org/repo:Q4_0", "https://h/a.gguf"))
    assert not any(looks_remote(text) for text in ("a.gguf", "/data/a.gguf", "./a/b.gguf", "../a.gguf", "~/a.gguf"))
