"""`images verify`: checks of built images; recorded, or of a second build, if asked for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from appliance.image_facts import ENGINE_FACTS_PATH
from images import docker
from images.build import build
from images.choice import gpus, proofs, select
from images.console import ROOT, progress, say
from images.errors import VerificationError
from images.matrix import matrix, timing
from images.matrix.matrix import Cell
from images.proof import cell_facts, verify
from images.verbs import flags
from images.verbs.checkout import load, refuse_one_image
from images.verbs.machine import machine_here
from images.verbs.prove.reproduce import refuse_alone, reproduce_cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser)
    flags.add_certificates(parser)
    flags.add_common(parser)
    parser.add_argument("--image", metavar="IMAGE", help="verify this image; appliance:<cell> without it")
    about = f"then write into {proofs.PROOFS_FILE} that this image was built and verified here"
    parser.add_argument("--record", action="store_true", help=about)
    about = "instead: build this cell twice without a cache and compare the manifest digests"
    parser.add_argument("--reproduce", metavar="CELL", help=about)
    about = (
        "of --reproduce: build once and compare with this: IMAGE@DIGEST, sha256:DIGEST of a manifest, or FILE.oci.tar"
    )
    parser.add_argument("--against", metavar="WHAT", help=about)
    flags.add_source(parser, of="with --reproduce: ")
    flags.add_cuobjdump(parser)


def run(options: argparse.Namespace) -> int:
    if options.reproduce:
        return reproduce_cells(options)
    refuse_alone(options)
    _, cells = load(options)
    refuse_one_image(options, cells)
    ca_bundle = build.check_ca_bundle(options.ca_bundle)
    if options.dry_run:
        names = [check.__name__.removeprefix("check_") for check in verify.CHECKS]
        say(options, names, names)
        return 0
    engine = docker.Engine()
    build.refuse_platform(cells, engine.platform, done="verified")
    verify.refuse_absent(cells, engine, image=options.image)
    if options.record:
        _refuse_dirty(cells, engine, image=options.image)
    checks = {
        cell.id: verify.verify(
            ROOT,
            cell,
            engine,
            image=options.image or cell.tag,
            ca_bundle=ca_bundle,
            cuobjdump=options.cuobjdump,
        )
        for cell in cells
    }
    lines = [
        f"{'ok  ' if check.ok else 'FAIL'} {cell}  {check.name}: {check.detail}"
        for cell, found in checks.items()
        for check in found
    ]
    say(options, {cell: [asdict(check) for check in found] for cell, found in checks.items()}, lines)
    failed = [f"{cell}: {check.name}" for cell, found in checks.items() for check in found if not check.ok]
    if failed:
        message = f"{len(failed)} checks failed: {'; '.join(failed)}"
        raise VerificationError(message, hint="each line that says FAIL tells what was seen")
    if options.record:
        for cell in cells:
            record(ROOT, cell, checks[cell.id], engine, image=options.image or cell.tag)
    return 0


def record(root: Path, cell: Cell, checks: Sequence[verify.Check], engine: docker.Engine, *, image: str) -> None:
    """Writes images/proven.yaml, once every check of every cell has passed."""
    found = engine.image(image)
    if found is None:
        message = f"image is gone since it was verified, and was not recorded: {image}"
        raise VerificationError(message, hint=f"python -m images build --only {cell.id}")
    proofs.refuse_dirty(cell, found.labels.get(proofs.REVISION_LABEL))
    known = proofs.platform_of(cell, engine.platform)
    proof = proofs.of_checks(
        cell,
        known,
        {check.name: check.detail for check in checks},
        digest=found.id,
        commit=found.labels.get(proofs.REVISION_LABEL),
        today=datetime.now(UTC).date(),
        machine=_machine_words(machine_here(known)),
        took=timing.load(root / build.ARCHIVES, found.labels.get(build.BUILD_ID_LABEL, ""), found.id),
        base=build.other_base(found.labels),
        toolkit=build.other_toolkit(cell, found.labels),
        is_locked=found.labels.get(build.REPRODUCIBLE_LABEL) != "no",
    )
    proofs.record(root, matrix.load(root).cells, proof)
    progress(cell.id, f"recorded in {proofs.PROOFS_FILE}: {proof}")
    said = engine.run(image, (ENGINE_FACTS_PATH,), entrypoint=("cat",))
    path = cell_facts.record(root, cell, "\n".join(said.lines))
    progress(cell.id, f"engine facts are in {path}")


def _refuse_dirty(cells: Sequence[Cell], engine: docker.Engine, *, image: str | None) -> None:
    """Refuses an image of an edited tree before its checks, which take minutes."""
    for cell in cells:
        found = engine.image(image or cell.tag)
        proofs.refuse_dirty(cell, found.labels.get(proofs.REVISION_LABEL) if found else None)


def _machine_words(here: select.Machine) -> str:
    """Describes this machine without the host's name."""
    cards = f"{gpus.describe(here.gpus)}, driver {here.driver}" if here.gpus else "no GPU"
    return f"{here.platform}, {os.cpu_count()} CPUs, {cards}"
