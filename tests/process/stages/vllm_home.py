"""`appliance serve` with a folder of safetensors and the fake vLLM in place of the engine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from appliance.image_facts import EngineFacts, dump_facts
from tests.builders import IMAGE
from tests.process.stages.boot import ROOT, Home, Serving
from tests.process.stages.vllm import FAKE_VLLM
from tests.shapes.folders import write_folder

FACTS = ROOT / "appliance/engines/vllm/cells/vllm-cpu.json"
LIBRARIES = (("python", "3.12.11"), ("torch", "2.13.0+cpu"))
SAYS = (
    "version", "commit", "flags", "choices", "kv_types", "quantizations", "attention", "tool_parsers",
    "reasoning_parsers", "libraries",
)  # fmt: skip


class VllmHome(Home):
    """A volume with SmolLM2's shape, weights of holes, and an engine folder."""

    @classmethod
    def make(cls, folder: Path) -> VllmHome:
        home = cls(folder)
        for name in ("data/models", "engine/bin", "facts"):
            (folder / name).mkdir(parents=True)
        write_folder(home.data / "models/small", "smollm2-135m")
        facts = json.loads(FACTS.read_text())
        image = replace(IMAGE, engine="vllm", engine_version=facts["version"], cell="vllm-cpu")
        (folder / "facts/image_facts.json").write_text(dump_facts(image))
        engine = EngineFacts(
            version=facts["version"],
            build=0,
            commit=facts["commit"],
            flags=tuple(facts["flags"]),
            kv_types=tuple(facts["kv_types"]),
            tool_parsers=tuple(facts["tool_parsers"]),
            reasoning_parsers=tuple(facts["reasoning_parsers"]),
            libraries=LIBRARIES,
        )
        (folder / "facts/engine_facts.json").write_text(dump_facts(engine))
        home.set_engine()
        home.set_installed(**{**facts, "libraries": LIBRARIES})
        return home

    def set_installed(self, **facts: object) -> None:
        """Make the engine's Python answer these facts about the installed vLLM."""
        answer = self.folder / "engine/installed.json"
        answer.write_text(json.dumps({name: facts[name] for name in SAYS}))
        python = self.folder / "engine/bin/python"
        python.write_text(f'#!/bin/sh\nexec cp {shlex.quote(str(answer))} "$2"\n')
        python.chmod(0o755)

    @property
    def segments(self) -> list[str]:
        """Shared memory that engines made and that is still there."""
        path = self.folder / "segments"
        return [name for name in path.read_text().split() if Path(name).exists()] if path.exists() else []

    def free_segments(self) -> None:
        """Remove the shared memory that a killed appliance leaves, which would fill this machine's memory. For a test's
        end."""
        for name in self.segments:
            Path(name).unlink()

    @contextmanager
    def serving(self, **settings: str) -> Iterator[Serving]:
        """Run the appliance in the block, and kill its engine's processes at the end. A killed appliance ends only the
        engine's first process; a container would end the others."""
        with super().serving(**settings) as serving:
            try:
                yield serving
            finally:
                serving.process.kill()
                for pid in serving.engine_pids():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    always: tuple[str, ...] = ()  # knobs of the fake vLLM at every start

    def copy(self, folder: Path) -> Self:
        found = super().copy(folder)
        found.always = self.always
        found.set_engine()
        return found

    def set_engine(self, *knobs: str, where: str = "") -> None:
        """Give the fake vLLM `knobs` at starts whose command line holds `where`, and only `always` at others."""
        blocks = ("--block-size", "128", "--fake-block-bytes", "2949120")  # as the CPU build has them of that model
        common = ("--fake-segments", str(self.folder / "segments"), *blocks, *self.always)
        run = shlex.join([sys.executable, "-I", "-S", str(FAKE_VLLM)])
        path = self.folder / "engine/bin/vllm"
        path.write_text(
            f"""#!/bin/sh
printf '%s\\n' "$*" >>{shlex.quote(str(self.starts))}
case "$* " in
*{shlex.quote(where)}*) exec {run} "$@" {shlex.join((*common, *knobs))} ;;
*) exec {run} "$@" {shlex.join(common)} ;;
esac
"""
        )
        path.chmod(0o755)
