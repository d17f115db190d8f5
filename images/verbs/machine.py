"""This machine's GPUs, asked of nvidia-smi."""

from __future__ import annotations

from images import docker
from images.choice import select, smi
from images.console import ROOT
from images.matrix import matrix


def machine_here(here: matrix.Platform) -> select.Machine:
    def run(words: tuple[str, ...]) -> docker.Finished:
        return docker.capture(words, cwd=ROOT, timeout_s=docker.QUICK_TIMEOUT_S)

    return smi.query_machine(run, here)
