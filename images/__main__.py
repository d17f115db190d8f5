"""python -m images list | render | build | verify | lock: the build half's command line."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from images import build, compat, docker, drift, fetch, lock, matrix, render, verify
from images.errors import FatalError, UsageError, VerificationError
from images.matrix import Cell, Matrix

ROOT = Path(__file__).resolve().parent.parent
EXIT_CODES = "exit codes: 0 done, 2 usage, 10 the matrix cannot be, 60 not built, 61 not what it must be"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.verb(arguments))
    except FatalError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code


def _list(arguments: argparse.Namespace) -> int:
    _, cells = _load(arguments)
    rows = [_row(cell) for cell in cells]
    _say(arguments, rows, [f"{row['id']:<20} {row['base']:<44} {row['platforms']}  {row['status']}" for row in rows])
    return 0


def _render(arguments: argparse.Namespace) -> int:
    _, cells = _load(arguments)
    files = {path: text for cell in cells for path, text in _rendered(cell).items()}
    if arguments.check:
        lines = drift.drift(ROOT, files)
        if lines:
            message = f"rendered files are not what the matrix says: {'; '.join(lines)}"
            raise VerificationError(message, hint=f"{render.RENDER_COMMAND}, then commit what it wrote")
    elif not arguments.dry_run:
        drift.write(ROOT, files)
    paths = [path.as_posix() for path in files]
    _say(arguments, paths, paths)
    return 0


def _build(arguments: argparse.Namespace) -> int:
    _, cells = _load(arguments)
    if arguments.tag and len(cells) != 1:
        message = f"--tag names one image, but {len(cells)} cells match: {arguments.only}"
        raise UsageError(message, hint="choose one with --only")
    options = build.Options(
        base=arguments.base,
        ca_bundle=build.check_ca_bundle(arguments.ca_bundle),
        tag=arguments.tag,
        epoch_s=arguments.epoch,
        no_cache=arguments.no_cache,
        force=arguments.force or arguments.no_cache,
    )
    engine = docker.Engine()
    results = [_build_cell(cell, options, engine, is_dry=arguments.dry_run) for cell in cells]
    _say(arguments, results, [_build_line(result) for result in results])
    return 0


def _build_cell(cell: Cell, options: build.Options, engine: docker.Engine, *, is_dry: bool) -> dict[str, object]:
    base = build.choose_base(cell, options.base, engine)
    _progress(cell, base.describe(cell))
    job = build.plan_job(ROOT, cell, options, base)
    if is_dry:
        return {"cell": cell.id, "build_id": job.build_id, "command": list(build.buildx_argv(job))}
    reused = None if options.force else build.find_built(job, engine)
    if reused:
        _progress(cell, f"reused: {reused.tag} has this build id already: {reused.build_id} (--force builds it again)")
    return asdict(reused or build.build(ROOT, job, engine))


def _build_line(result: Mapping[str, object]) -> str:
    """What a script wants on stdout: the tag, or the command that a dry run would have run."""
    command = result.get("command")
    return shlex.join(command) if isinstance(command, list) else str(result["tag"])


def _verify(arguments: argparse.Namespace) -> int:
    _, cells = _load(arguments)
    ca_bundle = build.check_ca_bundle(arguments.ca_bundle)
    if arguments.dry_run:
        names = [check.__name__.removeprefix("check_") for check in verify.CHECKS]
        _say(arguments, names, names)
        return 0
    engine = docker.Engine()
    checks = {
        cell.id: verify.verify(ROOT, cell, engine, image=arguments.image or cell.tag, ca_bundle=ca_bundle)
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
    return 0


def _lock(arguments: argparse.Namespace) -> int:
    known = matrix.load(ROOT).locks
    names = [name for name in known if not arguments.names or name in arguments.names]
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        message = f"no such lock: {', '.join(unknown)}"
        raise UsageError(message, hint=matrix.near_miss(unknown[0], known) or f"the locks are {', '.join(known)}")
    if arguments.dry_run:
        _say(arguments, names, names)
        return 0
    ca_bundle = build.check_ca_bundle(arguments.ca_bundle)
    changed = {
        name: lock.lock(ROOT, name, known[name], ca_bundle=ca_bundle, upgrade=arguments.upgrade) for name in names
    }
    _say(arguments, changed, [f"{name}: {'changed' if is_new else 'as it was'}" for name, is_new in changed.items()])
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    recipe = fetch.load_recipe(ROOT, arguments.name)
    if arguments.dry_run:
        target = arguments.to / recipe.file
    else:
        target = fetch.fetch(ROOT, recipe, arguments.to, ca_bundle=build.check_ca_bundle(arguments.ca_bundle))
    _say(arguments, {"file": str(target), "sha256": recipe.sha256}, [str(target)])
    return 0


def _load(arguments: argparse.Namespace) -> tuple[Matrix, tuple[Cell, ...]]:
    """The whole matrix is checked, also when one cell is asked for."""
    loaded = matrix.load(ROOT)
    compat.check(loaded.cells)
    return loaded, matrix.select(loaded.cells, arguments.only)


def _rendered(cell: Cell) -> dict[Path, str]:
    return render.render(cell, render.load_template(ROOT, cell))


def _row(cell: Cell) -> dict[str, object]:
    return {
        "id": cell.id,
        "engine": f"{cell.engine.title} {cell.engine.version} b{cell.engine.build}",
        "cuda": cell.target.cuda,
        "sm": cell.target.sm,
        "platforms": ",".join(cell.platforms),
        "base": cell.base.image,
        "status": cell.base.status,
        "cpu_variants": list(cell.cpu_variants),
        "size_budget_mib": cell.size_budget_mib,
    }


def _say(arguments: argparse.Namespace, data: object, lines: Sequence[str]) -> None:
    print(json.dumps(data, indent=1) if arguments.json else "\n".join(lines))


def _progress(cell: Cell, line: str) -> None:
    print(f"{cell.id}: {line}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m images", description=__doc__, epilog=EXIT_CODES)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(name: str, about: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=about, description=about, epilog=EXIT_CODES, parents=[*parents, _common()])

    add("list", "show every cell of build_matrix.yaml", _only()).set_defaults(verb=_list)
    _add_render_flags(add("render", "write images/rendered/<cell>/ from matrix and templates", _only()))
    _add_build_flags(add("build", "build images and load them into the engine", _only(), _certificates()))
    _add_verify_flags(add("verify", "prove what is inside built images", _only(), _certificates()))
    _add_lock_flags(add("lock", "write images/locks/*.txt from *.in; nothing else writes them", _certificates()))
    _add_fetch_flags(add("fetch", "bring the weights of images/models/NAME.yaml here", _certificates()))
    return parser


def _common() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--json", action="store_true", help="print data as JSON on stdout; progress stays on stderr")
    flags.add_argument("--dry-run", action="store_true", help="say what would be done and do nothing")
    return flags


def _only() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--only", metavar="GLOB", default="*", help="cells by id, such as llama-cpu or 'llama-*'")
    return flags


def _certificates() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    about = "PEM file of an intercepting proxy; a secret of the build, never in a layer"
    flags.add_argument("--ca-bundle", metavar="FILE", type=Path, help=about)
    return flags


def _add_render_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit 61 naming each file that differs")
    parser.set_defaults(verb=_render)


def _add_build_flags(parser: argparse.ArgumentParser) -> None:
    about = "build on this image of the engine instead of the pinned one; `auto`: the pinned one if it can be had"
    parser.add_argument("--base", metavar="IMAGE", help=about)
    parser.add_argument("--tag", metavar="IMAGE", help="name of the image; appliance:<cell> without it")
    parser.add_argument("--epoch", metavar="SECONDS", type=int, help="date of the image; without it the last commit's")
    parser.add_argument("--no-cache", action="store_true", help="run every step again; recompiles the engine")
    parser.add_argument("--force", action="store_true", help="build even if an image with this build id is here")
    parser.set_defaults(verb=_build)


def _add_verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", metavar="IMAGE", help="verify this image; appliance:<cell> without it")
    parser.set_defaults(verb=_verify)


def _add_lock_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="locks to write; all without it")
    parser.add_argument("--upgrade", action="store_true", help="move to the newest versions that the .in files allow")
    parser.set_defaults(verb=_lock)


def _add_fetch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a file of images/models, without .yaml")
    parser.add_argument("--to", metavar="DIR", type=Path, default=ROOT / ".make/models", help="default: .make/models")
    parser.set_defaults(verb=_fetch)


if __name__ == "__main__":
    sys.exit(main())
