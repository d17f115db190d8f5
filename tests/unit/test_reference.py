"""What a user may call a model, and what is refused."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError
from appliance.reference import Reference, file_name, is_safe_path, looks_remote, parse_reference

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
def test_a_repository(text: str, expected: dict[str, str]) -> None:
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


@pytest.mark.parametrize("text", ["oci://ghcr.io/org/model:tag", "docker://ai/qwen3"])
def test_artifacts_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="OCI artifacts are not fetched"):
        parse_reference(text)


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
    assert (found.repo is None) != (found.url is None)
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
