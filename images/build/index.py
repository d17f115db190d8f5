"""Wheels from another package index than PyPI, for one build: a company's mirror or a local cache.

Every instruction that calls pip gets a mount of pip's configuration with the address, as `mirror.py` does for Debian.
The mount is a secret, in no layer, no history and no cache key. The hashes of the locks still apply.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from images.build.build import Job
from images.build.installed import INSTRUCTION
from images.build.mirror import folder_of

SECRET, FILE, TARGET = "pip-index", "pip.conf", "/etc/pip.conf"
MOUNT = f"--mount=type=secret,id={SECRET},target={TARGET},mode=0444 \\\n    "


def plan(job: Job) -> Job:
    """Returns the job with pip's configuration as a secret, which `through` writes; unchanged without an index."""
    if job.index_url is None:
        return job
    folder = folder_of(job)
    secret = f"id={SECRET},src={(folder / FILE).as_posix()}"
    return replace(job, variant=job.variant or folder / "Dockerfile", secrets=(*job.secrets, secret))


def through(root: Path, job: Job) -> Job:
    """Returns the planned job and writes its Dockerfile and pip's configuration. `mirror.workplace` removes them."""
    if job.index_url is None:
        return job
    planned = plan(job)
    source, variant = root / job.dockerfile, root / planned.dockerfile
    text = through_index(source.read_text("utf-8"))
    variant.parent.mkdir(parents=True, exist_ok=True)
    variant.write_text(text, "utf-8")
    ignore = root / f"{job.cell.folder / 'Dockerfile'}.dockerignore"
    if ignore.is_file():
        shutil.copyfile(ignore, f"{variant}.dockerignore")
    conf = root / folder_of(job) / FILE
    conf.touch(mode=0o600)
    conf.write_text(configuration(job.index_url), "utf-8")
    return planned


def configuration(url: str) -> str:
    """Returns pip's configuration. An index without TLS is trusted by name; the hashes of the lock protect."""
    parts = urlsplit(url)
    trusted = f"trusted-host = {parts.netloc.rpartition('@')[2]}\n" if parts.scheme == "http" else ""
    return f"[global]\nindex-url = {url}\n{trusted}"


def through_index(dockerfile: str) -> str:
    """Returns the Dockerfile with the mount at each call of pip: the same bytes for every index."""
    return INSTRUCTION.sub(_mounted, dockerfile)


def _mounted(instruction: re.Match[str]) -> str:
    text = instruction.group()
    return text.replace("RUN ", f"RUN {MOUNT}", 1) if text.startswith("RUN ") and "pip install " in text else text
