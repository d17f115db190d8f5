"""Forms of secrets: each is found where it is, and what only looks alike is none."""

from __future__ import annotations

import base64
import random
import string
from pathlib import Path

import pytest

from images.layers.leaks import BINARY_BYTES_MAX, forms, leaks
from tests.unit.images.layers.test_images_tree import read_layers

ALNUM = string.ascii_letters + string.digits
RANDOM = random.Random(1)


def made(length: int, alphabet: str = ALNUM) -> str:
    """Return a random word that stands for a secret, so that this file contains none."""
    return "".join(RANDOM.choice(alphabet) for _ in range(length))


CASES = [
    ("AWS access key", "etc/a.txt", "key AK" + f"IA{made(16, string.ascii_uppercase + '234567')}\n"),
    ("AWS secret key", "root/.aws/credentials", f"aws_secret_access_key = {made(40, ALNUM + '/+')}\n"),
    ("AWS secret key", "opt/x.json", f'{{"SecretAccessKey":"{made(40)}"}}'),
    ("Google API key", "app.js", '"AI' + f"za{made(35)}"),
    ("Google OAuth secret", "c.json", f"GOCSPX-{made(28)}"),
    ("private key in JSON", "sa.json", f'"private_key": "-----BEGIN PRIVATE KEY-----\\n{made(64)}\\n"'),
    ("Azure storage key", "a.env", f"DefaultEndpointsProtocol=https;AccountKey={made(86)}==;"),
    ("Azure client secret", "a.env", f"secret={made(3)}8Q~{made(34)}"),
    *(("GitHub token", "a", f"{kind}_{made(36)}") for kind in ("ghp", "gho", "ghu", "ghs", "ghr")),
    ("GitHub fine-grained token", "a", f"github_pat_{made(82)}"),
    ("GitLab token", "a", f"glpat-{made(20)}"),
    ("Hugging Face token", "opt/appliance/.env", f"HF_TOKEN=hf_{made(34)}"),
    ("OpenAI key", "a", f"sk-proj-{made(74)}T3Blbk" + f"FJ{made(74)}"),
    ("OpenAI key", "a", f"sk-{made(20)}T3Blbk" + f"FJ{made(20)}"),
    ("OpenAI key without its mark", "a", f"sk-{made(48)}"),
    ("OpenAI key without its mark", "a", f"sk-proj-{made(50)}"),
    ("Anthropic key", "a", f"sk-ant-api03-{made(93)}AA"),
    ("Slack token", "a", f"xoxb-{made(12, string.digits)}-{made(12, string.digits)}-{made(24)}"),
    ("Slack webhook", "a", f"https://hooks.slack.com/services/{made(9)}/{made(11)}/{made(24)}"),
    ("npm token", "a", f"npm_{made(36)}"),
    ("PyPI token", "a", f"pypi-AgEIcHlwaS5vcmc{made(60)}"),
    ("Docker Hub token", "a", f"dckr_pat_{made(27)}"),
    (
        "Docker login",
        "root/.docker/config.json",
        f'{{"auths": {{"r": {{"auth": "{base64.b64encode(b"me:pw123456").decode()}"}}}}}}',
    ),
    ("password in .netrc", "root/.netrc", "machine h login me password pw1234"),
    ("password in .netrc", "etc/apt/auth.conf.d/own.conf", "machine h login me password pw1234"),
    ("password in a URL", "etc/pip.conf", "[global]\nindex-url = https://me:pw1234@index.example/simple\n"),
    ("password in a URL", "root/.git-credentials", "https://me:pw1234@forge.example\n"),
    ("password in .pypirc", "root/.pypirc", "[pypi]\nusername = me\npassword = pw1234\n"),
]


@pytest.mark.parametrize(
    ("name", "path", "text"), CASES, ids=[f"{name}-{number}" for number, (name, *_) in enumerate(CASES)]
)
def test_a_secret_is_found_by_its_form(tmp_path: Path, name: str, path: str, text: str) -> None:
    tree = read_layers(tmp_path, {}, {path: text.encode()}, {path: b""})
    assert f"layer 1: {path} ({name})" in tree.secrets, "also in a layer that a later one hides"
    assert read_layers(tmp_path, {path: text.encode()}).secrets == [], "what the base brings is public"


def test_every_form_has_a_case() -> None:
    assert {form.name for form in forms()} == {name for name, *_ in CASES}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a", f"xghp_{'a1' * 18}"),  # inside a longer word
        ("a", "hf_hub_download_and_extract_archive_to_folder"),
        ("doc.md", "pip install --index-url https://user:password@host/simple"),  # no file of settings
        ("etc/apt/sources.list", "deb https://deb.debian.org/debian bookworm main"),
        ("etc/pip.conf", "[global]\nindex-url = https://index.example/simple\n"),
        ("opt/model/config.json", '{"auth": null, "architectures": ["LlamaForCausalLM"]}'),
        ("a.py", "aws_secret_access_key: str | None = None"),
        ("a", "password hunter2"),
    ],
)
def test_what_is_no_secret(path: str, text: str) -> None:
    assert list(leaks(text.encode(), path)) == []


def test_a_large_binary_is_not_searched() -> None:
    token = f"ghp_{made(36)}".encode()
    large = b"\0" * BINARY_BYTES_MAX
    assert list(leaks(large + b" " + token)) == []
    assert list(leaks(b"\0 " + token)) == ["GitHub token"]
    assert list(leaks(b"a" * BINARY_BYTES_MAX + b" " + token)) == ["GitHub token"]
