"""Runs a script as a step of a build, on the build's base and network, and returns its output."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from images import docker
from images.build.build import Job, explain_failure, targeted_argv

STAGE, TARGET = "asked", "answer"
ANSWER = "answer.txt"
CONTEXT = "asked-script"
# What apt fetches to answer would stay in the builder's cache, 160 MiB with each question.
SCRATCH = " ".join(f"--mount=type=tmpfs,target={folder}" for folder in ("/var/cache/apt", "/var/lib/apt/lists"))
DOCKERFILE = f"""\
FROM @BASE@ AS {STAGE}
RUN --mount=type=bind,from={CONTEXT},target=/run/asked {SCRATCH} sh -eu /run/asked/script > /{ANSWER}

FROM scratch AS {TARGET}
COPY --from={STAGE} /{ANSWER} /
"""


def ask(root: Path, job: Job, script: str, *, is_cached: bool) -> str:
    """Runs the script and returns its output. Raises BuildError if it fails, ArchiveError if an archive is the cause.

    `is_cached`: True if the output never changes.
    """
    folder = root / job.archive.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="asked-", dir=folder) as name:
        own, context, out = Path(name) / "Dockerfile", Path(name) / "context", Path(name) / "out"
        own.write_text(DOCKERFILE.replace("@BASE@", job.cell.base.reference), "utf-8")
        Path(f"{own}.dockerignore").write_text("*\n", "utf-8")
        context.mkdir()
        (context / "script").write_text(script, "utf-8")
        asking = replace(job, variant=own, contexts=(f"{CONTEXT}={context}",), secrets=(), toolkit=None, no_cache=False)
        *words, project = targeted_argv(asking, TARGET, f"type=local,dest={out}")
        done = docker.stream((*words, *(() if is_cached else ("--no-cache-filter", STAGE)), project), cwd=root)
        if done.code != 0:
            raise explain_failure(job.cell, done.lines)
        return (out / ANSWER).read_text("utf-8")
