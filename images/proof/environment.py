"""Compares an image's variables with those of its base and its Dockerfile. Pure.

A changed PATH makes the entry point start another program, and a variable of Python or of the engine makes it load
other code, with every file unchanged.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from images.pins import debian

# What BuildKit gives a base that has none (moby/buildkit, util/system/path.go), and what Debian's bases say too.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV = re.compile(r"^ENV (.+)$", re.MULTILINE)


def given(dockerfile: str, base: Sequence[str], arguments: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the last stage. `base`: NAME=value lines of its image; `arguments`: values of ARGs."""
    stage = debian.STAGE.split(dockerfile.replace("\\\n", " "))[-1]
    lines = [word for line in ENV.findall(stage) for word in shlex.split(line)]
    found = {"PATH": PATH} | dict(_pair(line) for line in (*base, *lines))
    for name, value in arguments.items():
        found = {key: said.replace(f"${{{name}}}", value) for key, said in found.items()}
    return found


def differing(lines: Sequence[str], expected: Mapping[str, str]) -> list[str]:
    """Returns a line for each added, changed, repeated or missing variable. `lines`: of the image's configuration."""
    pairs = [_pair(line) for line in lines]
    other = [f"{name}={value}, expected {expected.get(name)}" for name, value in pairs if expected.get(name) != value]
    names = [name for name, _ in pairs]
    twice = [f"{name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    return [*other, *twice, *(f"gone: {name}" for name in expected if name not in names)]


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name, value
