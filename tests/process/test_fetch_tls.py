"""Certificates: of the machine, of SSL_CERT_FILE, or of the lock of an image; an untrusted one ends it at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from appliance.errors import DownloadError
from appliance.settings import HubSettings
from appliance.weights.download.hub import resolve
from tests.process.stages.fetching import ROOT

COUNT = "from appliance.weights.download.ranges import tls_context; print(tls_context().cert_store_stats()['x509_ca'])"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate of 127.0.0.1 in one file, signed by nobody."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: it makes the certificate of the test's server")
    path = tmp_path_factory.mktemp("tls") / "own.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    argv = ["openssl", *words.split(), "-keyout", str(path), "-out", str(path.with_suffix(".crt"))]
    subprocess.run(argv, check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


@pytest.fixture
async def endpoint(certificate: Path) -> AsyncIterator[str]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("text", ["org/repo", "{endpoint}/a.gguf"])
async def test_one_that_is_not_trusted_ends_it_at_once(endpoint: str, text: str) -> None:
    began = time.monotonic()
    with pytest.raises(DownloadError, match=r"the certificate of 127.0.0.1 is not trusted: .*self-signed") as caught:
        await resolve(text.format(endpoint=endpoint), HubSettings(endpoint=endpoint))
    assert time.monotonic() - began < 60.0
    assert "SSL_CERT_FILE" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["org/repo", "{endpoint}/a.gguf"])
async def test_one_of_ssl_cert_file_is(endpoint: str, certificate: Path, text: str) -> None:
    """The server answers 404, which is an answer."""
    argv = [sys.executable, "-m", "appliance", "models", "pull", text.format(endpoint=endpoint)]
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "SSL_CERT_FILE": str(certificate.with_suffix(".crt"))}
    data = certificate.parent / "data"
    await asyncio.to_thread(data.mkdir, exist_ok=True)
    program = await asyncio.create_subprocess_exec(
        *argv, "--data-dir", str(data), cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, err = await program.communicate()
    assert b"repository is private or does not exist" in err or b"answers 404" in err, err
    assert program.returncode == (10 if text == "org/repo" else 32)


def test_an_image_without_any_gets_those_of_its_lock() -> None:
    environment = {**os.environ, "SSL_CERT_FILE": "/nowhere", "SSL_CERT_DIR": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 100
