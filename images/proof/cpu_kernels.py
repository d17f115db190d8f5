"""Executes every CPU variant of a built image: on this machine if its CPU can, else in an emulated one.

Compiling proves nothing: bookworm's gcc 12 compiled an AMX variant that died at its first instruction. So `kernel-
check` in the image compares each variant's matrix products and attention with the baseline's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from images import docker
from images.errors import VerificationError
from images.matrix.engines import LLAMA
from images.matrix.matrix import Variants

FOLDER = LLAMA.folder
PROGRAM = f"{FOLDER}/kernel-check"
DOCKERFILE = Path("images/emulator/Dockerfile")
EMULATOR = "/usr/bin/qemu-x86_64-static"
# In software a product takes some 50 times as long; 512 columns run the same code as 8 and a loop around it. Making
# weights of the lattice types (IQ1 to IQ3) alone would take minutes.
EMULATED_CASES = ("--types", "simple", "--columns", "1,8", "--threads", "1")

Status = Literal["ok", "wrong", "died", "refused", "unloadable"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of one variant. `at` is its worst case, or the one in which it died."""

    variant: str
    status: Status
    cases: int
    worst_nmse: float | None  # None: not a number
    limit: float
    at: str
    signal: str | None
    is_compared: bool
    cpu: str | None = None  # the emulated one; None: this machine's

    @property
    def is_executed(self) -> bool:
        return self.status != "refused"

    def describe(self) -> str:
        where = f" on an emulated {self.cpu}" if self.cpu else ""
        match self.status:
            case "ok":
                return f"{self.variant}{where}: {self.cases} cases, NMSE up to {self.worst_nmse:.1e} ({self.at})"
            case "wrong":
                error = "no number" if self.worst_nmse is None else f"{self.worst_nmse:.1e}"
                return f"{self.variant}{where}: NMSE {error}, the limit is {self.limit:.0e}: {self.at}"
            case "died":
                return f"{self.variant}{where}: died of {self.signal or 'an exit of its own'} at {self.at}"
            case "unloadable":
                return f"{self.variant}{where}: cannot be loaded"
            case "refused":
                return f"{self.variant}{where}: needs another CPU"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Verdicts of the variants, one or more each. `why_not_emulated` tells what kept the emulator away."""

    built: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    why_not_emulated: str | None = None

    @property
    def faults(self) -> list[str]:
        wrong = [each.describe() for each in self.verdicts if each.status not in ("ok", "refused")]
        uncompared = [
            f"{each.variant}: compared with nothing"
            for each in self.verdicts
            if each.status == "ok" and not each.is_compared
        ]
        return wrong + uncompared + ([] if self.executed else ["no variant could be executed"])

    @property
    def executed(self) -> list[str]:
        return [name for name in self.built if any(v.variant == name and v.is_executed for v in self.verdicts)]

    @property
    def unproven(self) -> list[str]:
        return [name for name in self.built if name not in self.executed]

    def describe(self) -> str:
        here = [each.variant for each in self.verdicts if each.is_executed and each.cpu is None]
        emulated = [f"{each.variant} ({each.cpu})" for each in self.verdicts if each.is_executed and each.cpu]
        worst = max((each.worst_nmse or 0.0 for each in self.verdicts if each.is_executed), default=0.0)
        parts = [
            f"executed here: {', '.join(here) or 'none'}",
            f"emulated: {', '.join(emulated) or 'none'}",
            f"unproven, for want of such a CPU: {', '.join(self.unproven) or 'none'}",
            f"NMSE up to {worst:.1e}",
        ]
        if self.why_not_emulated:
            parts.append(f"no emulator: {self.why_not_emulated}")
        return "; ".join(parts)


def query(root: Path, engine: docker.Engine, *, image: str, tag: str, base: str, variants: Variants) -> Report:
    """Checks all variants, without a network. Raises VerificationError if nothing is said of a variant.

    `tag` names the emulator's image for as long as this takes; `base` is what it is built on.
    """
    here = _run(engine, image, (PROGRAM,), variants.built, variants.built[0])
    emulated, why_not = _emulated(root, engine, image=image, tag=tag, base=base, variants=variants)
    return Report(built=variants.built, verdicts=(*here, *emulated), why_not_emulated=why_not)


def parse_verdicts(lines: Iterable[str], *, cpu: str | None = None) -> list[Verdict]:
    """Returns the objects that kernel-check printed, one a line; other output is skipped."""
    found = []
    for line in lines:
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        found.append(
            Verdict(
                variant=row["variant"],
                status=row["status"],
                cases=row["cases"],
                worst_nmse=row["worst_nmse"],
                limit=row["limit"],
                at=row["at"],
                signal=row["signal"],
                is_compared=row["compared"],
                cpu=cpu,
            )
        )
    return found


def _emulated(
    root: Path, engine: docker.Engine, *, image: str, tag: str, base: str, variants: Variants
) -> tuple[list[Verdict], str | None]:
    """The verdicts of emulated CPUs, and why there are none.

    A check that passes is kept by the builder. Where one fails, all are run in containers, which tell how it failed.
    """
    reference = variants.built[0]
    given = (*_build_arguments(root, image, base), "--build-arg", f"REFERENCE={reference}")
    kept = [_kept(root, given, variant, cpu) for variant, cpu in variants.emulated.items()]
    if None not in kept:
        return [verdict for verdicts in kept for verdict in verdicts or ()], None
    why_not = _build_emulator(root, image=image, tag=tag, base=base)
    if why_not is not None:
        return [], why_not
    try:
        return _run_emulated(engine, tag, variants.emulated, reference), None
    finally:
        engine.remove(tag)


def _kept(root: Path, given: Sequence[str], variant: str, cpu: str) -> list[Verdict] | None:
    """The verdict on one variant as a layer of the builder's cache has it; None if the check did not pass, or said
    something else."""
    cases = " ".join(EMULATED_CASES)
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        words = ("--build-arg", f"CPU={cpu}", "--build-arg", f"VARIANT={variant}", "--build-arg", f"CASES={cases}")
        argv = (*given, *words, "--target", "verdicts", "--output", f"type=local,dest={folder}/out", folder)
        if docker.capture(argv, cwd=root).code != 0:
            return None
        lines = Path(folder, "out/verdicts").read_text("utf-8").splitlines()
    try:
        found = parse_verdicts(lines, cpu=cpu)
    except (KeyError, ValueError):
        return None
    return found if [each.variant for each in found] == [variant] else None


def _run_emulated(engine: docker.Engine, tag: str, cpus: Mapping[str, str], reference: str) -> list[Verdict]:
    return [
        verdict
        for variant, cpu in cpus.items()
        for verdict in _run(
            engine, tag, (EMULATOR, "-cpu", cpu, PROGRAM, *EMULATED_CASES), (variant,), reference, cpu=cpu
        )
    ]


def _run(
    engine: docker.Engine,
    image: str,
    command: Sequence[str],
    variants: Sequence[str],
    reference: str,
    *,
    cpu: str | None = None,
) -> list[Verdict]:
    program, *words = command
    argv = (*words, "--dir", FOLDER, "--variant", ",".join(variants), "--reference", reference)
    done = engine.run(image, argv, entrypoint=(program,))
    try:
        found = parse_verdicts(done.lines, cpu=cpu)
    except (KeyError, ValueError) as error:
        message = f"kernel-check in {image} printed something else than its verdicts: {error}"
        raise VerificationError(message) from error
    if [each.variant for each in found] != list(variants):
        said = " ".join(done.lines[-3:])
        message = f"kernel-check in {image} ended with {done.code} before it had judged {', '.join(variants)}: {said}"
        raise VerificationError(message, hint="is it an image of this tree? python -m images build makes it anew")
    return found


def _build_arguments(root: Path, image: str, base: str) -> tuple[str, ...]:
    return (
        *("docker", "buildx", "build", "--progress", "plain", "--provenance=false", "--sbom=false"),
        *("--file", str(root / DOCKERFILE), "--build-arg", f"IMAGE={image}", "--build-arg", f"BASE={base}"),
    )


def _build_emulator(root: Path, *, image: str, tag: str, base: str) -> str | None:
    """Builds the emulator's image. Returns None if it is there, else the reason, such as no network."""
    with tempfile.TemporaryDirectory(prefix="emulator-") as context:
        words = ("--load", "--target", "emulator", "--tag", tag, context)
        done = docker.capture((*_build_arguments(root, image, base), *words), cwd=root)
    return None if done.code == 0 else " ".join(done.lines[-2:])[:300] or f"exit {done.code}"
