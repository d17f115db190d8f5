"""python3 -m images list | render | build | verify | sbom | bake | lock …: the build half's command line."""

from __future__ import annotations

# First: the project's own Python takes over if this one lacks a package.
import images.own_python  # noqa: F401 # isort: skip

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from images.console import EXIT_CODES, Parser, VerbParser, fail, open_streams
from images.errors import BuildError, FatalError

# The module below images.verbs is imported when the verb is called: --help must not pay for all of them.
VERBS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "list": ("show.list", "show every cell of build_matrix.yaml"),
    "render": ("write.render", "write images/rendered/<cell>/ from matrix and templates"),
    "build": ("make.build", "build images and load them into Docker"),
    "verify": ("prove.verify", "check the contents of built images"),
    "gate": ("prove.gate", "say which kernels of GPU libraries run natively on an SM; exit 61 if one needs a JIT"),
    "gaps": ("prove.gaps", "write images/gaps/<cell>.yaml: which code in an engine's wheels runs on which SM"),
    "sbom": ("prove.sbom", "write the bill of materials of built images as SPDX, .make/images/<cell>.spdx.json"),
    "router": ("make.router", "build and verify the image of the load balancer in compose/replicas.yaml"),
    "wheel": ("make.wheel", "build the host command as a wheel and an sdist of its own"),
    "published": ("write.published", "write images/published.yaml: digests and compressed sizes that a registry has"),
    "bake": ("write.bake", "write docker-bake.json: the builds for docker buildx bake"),
    "ci-matrix": ("write.ci_matrix", "write .github/images.json: the jobs of the images workflow"),
    "ci-steps": ("show.ci_steps", "show the steps of the workflows' jobs; with --out write the shell of each"),
    "prune": ("make.prune", "free the disk space that builds left in use"),
    "explain": ("show.explain", "say why a cell exists, cannot exist or is not built, with the sources"),
    "select": ("show.select", "print the image for this machine, or for a described one; the reason is on stderr"),
    "lock": ("write.lock", "write images/locks/*.txt from *.in; nothing else writes them"),
    "pin": ("write.pin", "move llama.cpp to a newer release, or say which patches do not apply to it"),
    "fetch": ("write.fetch", "download the weights of images/models/NAME.yaml"),
})  # fmt: skip
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell says of a program that SIGINT or SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    is_json = "--json" in words
    open_streams()
    try:
        options = parser().parse_args(words)
        code = int(options.run(options))
        sys.stdout.flush()  # a closed pipe shows here, and not while Python exits
        return code
    except FatalError as error:
        return fail(error, is_json=is_json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `images list | head -1`: the reader is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:  # a full disk or an unwritable folder, anywhere
        failure = BuildError(f"a file cannot be used: {error}", hint="is there room, and may this user write there?")
        return fail(failure, is_json=is_json)


def parser() -> Parser:
    found = Parser(prog="python3 -m images", description=__doc__, epilog=EXIT_CODES, allow_abbrev=False)
    verbs = found.add_subparsers(required=True, metavar="VERB", parser_class=VerbParser)
    for name, (module, about) in VERBS.items():
        place = f"images.verbs.{module}"
        verbs.add_parser(name, help=about, description=about, epilog=EXIT_CODES, allow_abbrev=False, module=place)
    return found


def _leave(number: int, _: object) -> NoReturn:
    """Ends like an interrupt does: programs that were started are ended on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:  # nohup ignores one of them
            signal.signal(ending, _leave)
    sys.exit(main())
