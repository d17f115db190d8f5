"""The shell of the workflows' steps as files: for shellcheck, and to run a job's steps without a forge.

An action is named and has no file. Expressions are allowed in `env` alone, so that no value of the forge becomes a part
of a script: a text with one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from images import rows
from images.errors import MatrixError

WORKFLOWS = Path(".github/workflows")
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
# What a forge runs a step's text with: `bash -e`, and where the step says `shell: bash` with pipefail as well.
OPTIONS: Mapping[str | None, str] = {None: "set -e", "bash": "set -eo pipefail"}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a job. `script` is None for an action; `environment` keeps the workflow's expressions."""

    workflow: str
    job: str
    number: int
    name: str
    condition: str | None
    script: str | None
    environment: Mapping[str, str]
    action: str | None

    @property
    def file(self) -> str:
        return f"{self.workflow}-{self.job}-{self.number}.sh"


def load(root: Path) -> tuple[Step, ...]:
    """Reads the steps of all workflows, in order. Raises MatrixError for a bad file or another shell than bash."""
    files = sorted((root / WORKFLOWS).glob("*.yml"))
    return tuple(step for file in files for step in parse(file.stem, _document(file.relative_to(root), root)))


def _document(path: Path, root: Path) -> Mapping[str, Any]:
    document = rows.load(path, root=root)
    if not isinstance(document, dict) or not isinstance(document.get("jobs"), dict):
        message = f"{path} cannot be read: it names no jobs"
        raise MatrixError(message)
    return document


def parse(workflow: str, document: Mapping[str, Any]) -> Iterator[Step]:
    for job, body in document["jobs"].items():
        for number, step in enumerate(body.get("steps", ()), start=1):
            environment = {**body.get("env", {}), **step.get("env", {})}
            yield Step(
                workflow=workflow,
                job=job,
                number=number,
                name=step.get("name") or step.get("uses", "").partition("@")[0],
                condition=step.get("if"),
                script=_script(workflow, job, step),
                environment={name: str(value) for name, value in environment.items()},
                action=step.get("uses"),
            )


def filled(text: str, values: Mapping[str, str]) -> str:
    """Replaces expressions in the text like the forge does. Raises KeyError for one without a value."""
    return EXPRESSION.sub(lambda found: values[found[1]], text)


def _script(workflow: str, job: str, step: Mapping[str, Any]) -> str | None:
    if "run" not in step:
        return None
    shell = step.get("shell")
    if shell not in OPTIONS:
        message = f"{WORKFLOWS / workflow}.yml: {job}: a step is of another shell than bash: {shell}"
        raise MatrixError(message, hint="shell: bash")
    if found := EXPRESSION.search(step["run"]):
        message = f"{WORKFLOWS / workflow}.yml: {job}: an expression is part of a script: {found[0]}"
        raise MatrixError(message, hint="give it to the step as a variable, under env:")
    return f"{OPTIONS[shell]}\n{step['run']}"
