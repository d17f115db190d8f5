"""The command line: verbs, exit codes, and the one place where FatalError is caught."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from appliance import __version__
from appliance.console.shown import command_line, quoted
from appliance.errors import FatalError, UsageError, printable
from appliance.host import verb_table as host
from appliance.settings import SETTINGS, Settings, load_settings, process_environment
from appliance.system.open_files import Spare, raise_limit

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.host.docker.http import Gateway
    from appliance.image_facts import Recipe
    from appliance.model import Format
    from appliance.preview.preview import Preview
    from appliance.probe import Hardware
    from appliance.probe.machine.described import DescribedMachine

DESCRIPTION = "Serve an open-weights language model on this machine, as fast as it can sustain."
EPILOG = (
    "Every setting is a flag, a variable (APPLIANCE_CTX_SIZE=8192) and a line of /data/appliance.yaml "
    "(ctx_size: 8192); flags win, then variables. Exit codes: 2 usage, 10 configuration, "
    "20 to 23 hardware, 30 to 32 model, 40 to 45 engine, 50 volume."
)


VERBS = ("serve", "plan", "tune", "probe", "doctor", "profiles", "models", "mode", "key", "keys", "usage", "health",
         "version", "engine-facts")  # fmt: skip
# Verbs that a container cannot use; `version` and those of SHARED_VERBS are verbs of both.
HOST_VERBS = tuple(name for name in host.VERBS if name not in VERBS)
SHARED_VERBS = ("mode", "usage")  # outside an image they are meant for a container on this machine


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError and names the flag or verb that a misspelt one is nearest to."""

    def error(self, message: str) -> NoReturn:
        known = re.findall(r"'([^']*)'", message) if "invalid choice: " in message else []
        near = difflib.get_close_matches(known[0], known[1:], 1) if known else []
        meant = f"perhaps you meant '{near[0]}'; " if near else ""
        raise UsageError(message, hint=f"{meant}see `{self.prog} --help`")


@command_line
def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in HOST_VERBS:
        return _on_the_host(words)
    try:
        if words and words[0] in SHARED_VERBS and not _is_in_image():
            return _on_the_host(words)
        return _run(words)
    except FatalError as error:
        _show(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _is_in_image() -> bool:
    return (load_settings({}, process_environment()).facts_dir / "image_facts.json").exists()


def _run(argv: list[str]) -> int:
    # The next container may run as another user of group 0, and must be able to change the files on the volume.
    os.umask(0o002)
    options = _parse(argv)
    raise_limit()
    verb: Callable[[argparse.Namespace, Settings, Mapping[str, str]], int] = options.run
    environment = process_environment()
    flags = {name: value for name in SETTINGS if (value := getattr(options, name, None)) is not None}
    settings = load_settings(flags, environment)
    # All verbs but `serve` are about one model: the one that is named, by its name in the file too, else the first.
    return verb(options, settings if options.verb == "serve" else settings.first_model()[0], environment)


def _with_verb(argv: Sequence[str]) -> list[str]:
    """Return the arguments, with `serve` before flags without a verb: images of other engines are started in that form.
    Raises UsageError if a verb follows flags."""
    if not argv or not argv[0].startswith("-") or argv[0] in ("-h", "--help", "--"):
        return list(argv)
    if argv[0] == "--version":
        return ["version", *argv[1:]]
    with_values = {setting.flag for setting in SETTINGS.values()}
    for before, word in itertools.pairwise(argv):
        if word in (*VERBS, *HOST_VERBS) and before not in with_values:
            message = f"verb stands behind flags: {word}"
            raise UsageError(message, hint=f"put it first: appliance {word} …; without a verb it is `serve`")
    return ["serve", *argv]


def _parse(argv: list[str]) -> argparse.Namespace:
    argv = _with_engine_args(_with_verb(argv))
    parser, known = _parser(argv)
    # Before argparse: it would take the value of a misspelt flag for an argument of the verb, and report that one.
    for word in argv:
        if word.startswith("--") and word.partition("=")[0] not in known:
            raise _unknown(word, known)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        raise _unknown(unknown[0], known)
    return options


def _with_engine_args(argv: Sequence[str]) -> list[str]:
    """Return the arguments with each --engine-arg and its value joined by `=`. The value begins with a hyphen, so
    argparse would take it for a flag."""
    flag, found, rest = SETTINGS["engine_arg"].flag, [], iter(argv)
    for word in rest:
        value = next(rest, None) if word == flag else None
        found.append(word if value is None else f"{word}={value}")
    return found


def _unknown(word: str, known: Sequence[str]) -> UsageError:
    flag = word.partition("=")[0]
    near = [] if flag in known else difflib.get_close_matches(flag, known, 1)  # flags of other verbs: no hint
    message = f"unknown argument: {word}"
    return UsageError(message, hint=f"perhaps you meant '{near[0]}'" if near else "see `appliance --help`")


def _parser(argv: Sequence[str]) -> tuple[_Parser, list[str]]:
    """Return the parser and all flags. Only the given verb gets its flags: those of all cost 20 ms a start."""
    parser = _Parser(prog="appliance", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    rows: tuple[tuple[str, Callable[..., int], str], ...] = (
        ("serve", _serve, "serve the model; measure while no requests come"),
        ("plan", _plan, "show what would be served, and why"),
        ("tune", _tune, "measure now, keep the profile, and exit"),
        ("probe", _probe, "show the hardware that this container may use"),
        ("doctor", _doctor, "check everything that a start depends on, and say what to do"),
        ("profiles", _profiles, "list, show, compare, export, import, pin or forget profiles, the results of tuning"),
        ("models", _models, "list, fetch, update, add, remove, verify or import models on the volume"),
        ("mode", _mode, "show the modes of the running appliance, or switch to one of them"),
        ("key", _key, "print the API key"),
        ("keys", _keys, "list, add, rotate or remove named API keys with limits"),
        ("usage", _usage, "show what was used with each key: requests, tokens, time"),
        ("health", _health, "ask the running appliance if it is ready; exit code 0 if so"),
        ("version", _version, "print versions"),
        (
            "engine-facts",
            _engine_facts,
            "write the facts that the engine's binary reports (for building an image)",
        ),
    )
    for name, run, words in rows:
        verb = verbs.add_parser(name, help=words, description=words, allow_abbrev=False)
        verb.set_defaults(run=run)
        if name not in argv:
            continue
        _add_settings(verb, with_rare="--help-all" in argv)
        if name in _ADDITIONS:
            _ADDITIONS[name](verb)
    if not any(name in argv for name, _, _ in rows):  # only --help and the hint for a misspelt verb need them
        _add_host_verbs(verbs)
    return parser, [*(setting.flag for setting in SETTINGS.values()), *_OTHER_FLAGS]


def _add_host_verbs(verbs: argparse._SubParsersAction[_Parser]) -> None:
    for name in HOST_VERBS:
        verbs.add_parser(name, help=f"host: {host.VERBS[name].about}")


def _add_settings(verb: argparse.ArgumentParser, *, with_rare: bool) -> None:
    rare = sum(setting.is_rare for setting in SETTINGS.values())
    verb.add_argument("--help-all", action="help", help=f"show this help with the {rare} settings that few people need")
    group = verb.add_argument_group("settings")
    for setting in SETTINGS.values():
        default = "" if setting.default in (None, ()) else f" [{_shown(setting.default)}]"
        words = (setting.help + default).replace("%", "%%")
        if setting.is_rare and not with_rare:
            words = argparse.SUPPRESS
        action = "append" if setting.is_list else "store"
        group.add_argument(setting.flag, metavar=setting.metavar, help=words, action=action)


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _add_model(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("model", nargs="?", metavar="MODEL", help=SETTINGS["model"].help, default=argparse.SUPPRESS)


def _add_plan(verb: argparse.ArgumentParser) -> None:
    _add_model(verb)
    verb.add_argument("--explain", action="store_true", help="show every value with its reason and source (default)")
    verb.add_argument("--verbose", action="store_true", help="also show the figures behind each reason")
    verb.add_argument("--dry-run", action="store_true", help="print the engine's command line and nothing else")
    words = "list the weights of a recipe or a repository: size, place, context, speed, verdict; * is chosen, + is here"
    verb.add_argument("--files", action="store_true", help=words)
    words = (
        "plan for the machine in this file: output of `probe --json`, a bundle of `doctor`, or YAML written by hand; "
        "- is stdin"
    )
    verb.add_argument("--machine", metavar="FILE", help=words)
    words = "plan for several machines, side by side; each FILE as for --machine"
    verb.add_argument("--compare", metavar="FILE", nargs="+", help=words)
    words = (
        "plan for the image of this cell of the build matrix (default: this image; outside an image the best cell for "
        "the machine)"
    )
    verb.add_argument("--cell", metavar="CELL", help=words)
    verb.add_argument("--json", action="store_true", help="for scripts")


def _add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="for scripts")


def _add_probe(verb: argparse.ArgumentParser) -> None:
    words = "measure the bandwidths of memory and GPUs now, and keep them on the volume; use it while nothing is served"
    verb.add_argument("--measure", action="store_true", help=words)
    _add_json(verb)


def _add_doctor(verb: argparse.ArgumentParser) -> None:
    words = "also write a file for a bug report; it has no key, no uuids, and no names of users, hosts or folders"
    verb.add_argument("--bundle", metavar="FILE", help=words)
    words = "also check the engine's kernels for the model's types, in every CPU variant that runs here and on the GPUs"
    verb.add_argument("--kernels", action="store_true", help=words)
    _add_json(verb)


def _add_profiles(verb: argparse.ArgumentParser) -> None:
    actions = ("list", "show", "diff", "export", "import", "pin", "unpin", "forget")
    verb.add_argument("action", nargs="?", choices=actions, default="list", help="default: list")
    verb.add_argument("id", nargs="?", metavar="ID", help="id of a profile, or its beginning")
    verb.add_argument("other", nargs="?", metavar="ID", help="with diff: the other id (default: this machine's key)")
    _add_json(verb)


def _add_models(verb: argparse.ArgumentParser) -> None:
    actions = ("list", "pull", "push", "update", "add", "rm", "remove", "verify", "import")
    verb.add_argument("action", nargs="?", choices=actions, default="list", help="default: list; rm is remove")
    words = (
        "name as in the list; with pull and update: org/repo, org/repo:Q4_K_M, a URL or oci://host/repository:tag; "
        "with add: the new name; with import: a path, or a name in a folder of another tool"
    )
    verb.add_argument("file", nargs="?", metavar="NAME", help=words)
    verb.add_argument("target", nargs="?", metavar="TO", help="with push: oci://host/repository:tag")
    verb.add_argument("--sha256", metavar="HEX", help="with add, import, and pull of a URL: refuse any other file")
    verb.add_argument("--repair", action="store_true", help="with verify: set damaged files aside")
    verb.add_argument("--dry-run", action="store_true", help="with update: only say what is newer")
    _add_json(verb)


def _add_mode(verb: argparse.ArgumentParser) -> None:
    from appliance.host.shared.mode import add_arguments

    add_arguments(verb)
    _add_json(verb)


def _add_keys(verb: argparse.ArgumentParser) -> None:
    from appliance.gateway.accounts.verbs import add_arguments

    add_arguments(verb)
    _add_json(verb)


def _add_usage(verb: argparse.ArgumentParser) -> None:
    from appliance.host.shared.usage import add_arguments

    add_arguments(verb)
    _add_json(verb)


def _add_engine_facts(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--bin", metavar="PATH", required=True, help="the engine's server binary")
    verb.add_argument("--out", metavar="PATH", required=True, help="file to write")
    words = "pairs of K and V types that were compiled with fast flash attention for GPUs: q8_0-q8_0;q8_0-q4_0"
    verb.add_argument("--kv-pairs", metavar="LIST", default="", help=words)


_OTHER_FLAGS = (
    *(
        "--",
        "--help",
        "--help-all",
        "--json",
        "--explain",
        "--verbose",
        "--dry-run",
        "--files",
        "--machine",
        "--cell",
        "--compare",
        "--sha256",
        "--repair",
        "--bin",
        "--out",
        "--kv-pairs",
        "--measure",
        "--bundle",
        "--kernels",
        "--requests-per-minute",
        "--tokens-per-minute",
        "--streams",
        "--until",
        "--admin",
        "--days",
        "--by",
    ),
)
_ADDITIONS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "serve": _add_model,
    "tune": _add_model,
    "plan": _add_plan,
    "probe": _add_probe,
    "doctor": _add_doctor,
    "profiles": _add_profiles,
    "models": _add_models,
    "mode": _add_mode,
    "keys": _add_keys,
    "usage": _add_usage,
    "version": _add_json,
    "engine-facts": _add_engine_facts,
}

# Each verb imports its modules when it runs: the imports of other verbs would delay it.


def _on_the_host(words: Sequence[str]) -> int:
    from appliance.host.__main__ import main as on_the_host

    return on_the_host(words)


def _serve(_: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> int:
    from appliance.console.report import Report
    from appliance.serve.run import serve

    with Report(settings.log).taking_logs() as report:
        return _run_loop(serve(settings, environment, report))


def _tune(_: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> int:
    from appliance.console.report import Report
    from appliance.serve.run import measure_only

    with Report(settings.log).taking_logs() as report:
        return _run_loop(measure_only(settings, environment, report))


def _run_loop(main: Coroutine[Any, Any, int]) -> int:
    import uvloop

    spare = Spare()

    async def run() -> int:
        try:
            return await main
        finally:
            spare.free()

    return uvloop.run(run())


def _plan(options: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> int:
    from appliance.preview.preview import preview
    from appliance.preview.text import plan_document, plan_text

    if options.compare:
        return _compare(options, settings, environment)
    machine = _described(options.machine)
    if options.files:
        return _plan_files(options, settings, environment, machine)
    found = preview(settings, environment, machine.hardware if machine else None, cell=options.cell)
    argv = _argv(found, settings)
    if options.json:
        print(json.dumps(plan_document(found, machine, argv), indent=1))
    elif options.dry_run:
        for words in found.warnings:
            print(f"warning: {words}", file=sys.stderr)
        print(" ".join(map(quoted, argv)))
    else:
        print(plan_text(found, machine, argv, is_verbose=options.verbose))
    return 0


def _argv(found: Preview, settings: Settings) -> tuple[str, ...]:
    """Return the engine's command line."""
    start = found.start
    return start.engine.command(found.plan, start.install, settings.runtime_dir / "appliance.sock").argv


def _compare(options: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> int:
    from appliance.preview.compared import as_text, compare
    from appliance.preview.preview import preview

    others = {"--machine": options.machine, "--files": options.files, "--dry-run": options.dry_run}
    if given := next((flag for flag, value in others.items() if value), None):
        message = f"--compare and {given} do not go together"
        raise UsageError(message, hint="--compare FILE FILE … takes the machines; --json and --cell go with it")

    def plan(machine: DescribedMachine) -> tuple[Preview, tuple[str, ...]]:
        found = preview(settings, environment, machine.hardware, cell=options.cell)
        return found, _argv(found, settings)

    machines = [machine for file in options.compare if (machine := _described(file))]
    rows = compare(machines, plan)
    print(json.dumps([row.as_document() for row in rows], indent=1) if options.json else as_text(rows))
    errors = [row.error for row in rows if row.error]
    return errors[0].exit_code if len(errors) == len(rows) else 0


def _described(file: str | None) -> DescribedMachine | None:
    """Read the machine of a --machine file. Prints its notes on stderr: missing facts, and settings of a bundle."""
    if file is None:
        return None
    from appliance.probe.machine.described import read_machine

    machine = read_machine(file)
    for words in machine.notes:
        print(words, file=sys.stderr)
    return machine


def _plan_files(
    options: argparse.Namespace,
    settings: Settings,
    environment: Mapping[str, str],
    machine: DescribedMachine | None,
) -> int:
    from appliance.preview.preview import preview_files
    from appliance.selection.table import as_document, as_text

    found = preview_files(settings, environment, machine.hardware if machine else None, cell=options.cell)
    print(json.dumps(as_document(found.choice), indent=1) if options.json else as_text(found.choice))
    return found.exit_code


def _probe(options: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> int:
    from dataclasses import replace

    from appliance.probe import as_document, probe
    from appliance.probe.gpu.smi import cross_check

    hardware = probe(settings.data_dir, environment)
    hardware = replace(hardware, gpus=cross_check(hardware.gpus, environment, settings.data_dir))
    if options.measure:
        return _measure(options, settings, hardware, environment)
    document = as_document(hardware)
    print(json.dumps(document, indent=1) if options.json else _as_lines(document))
    return 0


def _measure(
    options: argparse.Namespace, settings: Settings, hardware: Hardware, environment: Mapping[str, str]
) -> int:
    from dataclasses import asdict

    from appliance.probe import SPEEDS_FOLDER
    from appliance.probe.bandwidth.measure import describe, measure
    from appliance.probe.bandwidth.speeds import save_speeds
    from appliance.start.image import load_facts
    from appliance.start.machine import install_of
    from appliance.volume import open_volume

    open_volume(settings.data_dir)  # before the time is spent
    engine_dir = settings.engine_dir  # has the library to measure a GPU with; nothing else is needed
    if engine_dir is None:
        engine_dir = install_of(settings, *load_facts(settings), hardware).engine_dir
    measured = measure(hardware, engine_dir, environment, lambda words: print(words, file=sys.stderr))
    path = save_speeds(settings.data_dir / SPEEDS_FOLDER, hardware, measured.speeds)
    print(json.dumps(asdict(measured), indent=1) if options.json else describe(measured))
    print(f"kept in {path}, for every start on this machine", file=sys.stderr)
    return 0


def _doctor(options: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> int:
    from appliance.doctor import as_json, bundle, examine, show, write_bundle

    findings = examine(settings, environment, with_kernels=options.kernels)
    if options.json:
        print(as_json(findings))
    else:
        show(findings, sys.stdout)
    if options.bundle:
        from pathlib import Path

        names = [os.uname().nodename, *(environment.get(name, "") for name in ("USER", "LOGNAME", "HOSTNAME"))]
        write_bundle(Path(options.bundle), bundle(settings, findings, names, [_known_key(settings)]))
        print(f"{options.bundle}: read it before you send it", file=sys.stderr)
    return findings.exit_code


def _known_key(settings: Settings) -> str:
    from appliance.errors import VolumeError
    from appliance.volume import read_key

    try:
        return read_key(settings.key_path)
    except VolumeError:  # doctor reports this in a check of its own; an unreadable key cannot be in the bundle
        return ""


def _as_lines(document: Mapping[str, object], prefix: str = "") -> str:
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            lines.append(_as_lines(value, f"{prefix}{name}."))
        else:
            shown = (
                "unknown" if value is None else " ".join(map(str, value)) if isinstance(value, tuple | list) else value
            )
            lines.append(f"{prefix}{name}: {shown}")
    return "\n".join(lines)


def _profiles(options: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> int:
    from appliance.profile import ProfileStore
    from appliance.profile.verbs import CliContext, answer
    from appliance.selection.select import query_key
    from appliance.volume import open_volume

    context = CliContext(
        store=ProfileStore(settings.profiles_dir, lambda words: print(words, file=sys.stderr)),
        folder=str(settings.profiles_dir),
        this_key=lambda: query_key(settings, environment),
        writable=lambda: open_volume(settings.data_dir),
        read_input=lambda: sys.stdin.read(),
        as_json=options.json,
    )
    told = answer(options.action, [id for id in (options.id, options.other) if id], context)
    print(told.note, end="", file=sys.stderr)
    if told.text:
        print(told.text)
    return 0


def _models(options: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> int:
    if options.target and options.action != "push":
        message = f"models {options.action} takes one name, and got another: {printable(options.target)}"
        raise UsageError(message, hint="only `models push NAME TO` takes two")
    if options.action == "update" or (options.action == "pull" and options.file):
        return _pull(options, settings, environment)
    from appliance.settings import hub_settings
    from appliance.weights.verbs import Request, run

    request = Request(
        settings=settings,
        name=options.file,
        of_recipe=lambda: _of_recipe(options.file, settings, environment) or (),
        serving=lambda: _serving(settings),
        sha256=options.sha256,
        as_json=options.json,
        repairs=options.repair,
        target=options.target,
        hub=lambda: hub_settings(settings, environment),
    )
    return run(options.action, request)


def _serving(settings: Settings) -> dict[Path, str]:
    """Return the states of the running appliance's models, by the paths of their weights; empty if none runs."""
    from pathlib import Path

    from appliance.address import read_address
    from appliance.host.docker.http import NoAnswerError

    if read_address(settings.address_path) is None:
        return {}
    try:
        models = _running(settings).document("fleet")["models"]
    except NoAnswerError:
        return {}
    except FatalError as error:  # it runs, and says no more: files are listed all the same
        print(f"warning: the running appliance does not tell what is loaded: {error.message}", file=sys.stderr)
        return {}
    return {Path(row["path"]): row["state"] for row in models if row["path"]}


def _pull(options: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> int:
    from appliance.settings import hub_settings
    from appliance.volume import open_volume
    from appliance.weights.pull import Place, kept_by_recipe, pull, update

    hub = hub_settings(settings, environment)
    serves, recipe = _served_by_image(settings)
    place = Place(models_dir=settings.models_dir, hub=hub, is_folder=serves == "safetensors")
    open_volume(settings.data_dir)
    if options.action == "pull":
        from appliance.selection.recipe import wanted_variant

        wanted = wanted_variant(options.file, recipe, serves, hub)
        pulled = [pull(options.file, place, options.sha256, wanted=wanted)]
    elif (named := _of_recipe(options.file, settings, environment)) is not None:
        pulled = list(kept_by_recipe(options.file, named))
    else:
        pulled = list(update(options.file, place, is_dry=options.dry_run))
    if options.json:
        print(json.dumps([each.document() for each in pulled], indent=1))
    else:
        print("\n".join(each.describe() for each in pulled) or f"no repositories in {settings.models_dir}")
    return next((each.exit_code for each in pulled if each.exit_code), 0)


def _of_recipe(
    name: str | None, settings: Settings, environment: Mapping[str, str]
) -> tuple[tuple[str, Path], ...] | None:
    """Return the weights on this machine that a name of the image's recipe means, by name; None for any other name."""
    if not name or not (settings.facts_dir / "recipe.json").exists():
        return None
    from appliance.selection.recipe import variants_here
    from appliance.settings import hub_settings

    serves, recipe = _served_by_image(settings)
    return variants_here(name, recipe, serves, settings.models_dir, lambda: hub_settings(settings, environment))


def _served_by_image(settings: Settings) -> tuple[Format, Recipe | None]:
    """Return format and recipe. Outside an image there are no facts, and models are GGUF files."""
    from appliance.start.image import load_engine, load_facts, load_recipe

    if not (settings.facts_dir / "image_facts.json").exists():
        return "gguf", None
    image, _ = load_facts(settings)
    return load_engine(image).model_format, load_recipe(settings, image)


def _mode(options: argparse.Namespace, settings: Settings, _: Mapping[str, str]) -> int:
    from appliance.host.shared.mode import show_modes

    return show_modes(_running(settings), options)


def _running(settings: Settings) -> Gateway:
    """Return the running appliance of this container."""
    from appliance.host.docker.http import Gateway
    from appliance.volume import read_key

    host, port = _address_of(settings)
    return Gateway(host=host, port=port, key=read_key(settings.key_path))


def _address_of(settings: Settings) -> tuple[str, int]:
    """Return the host and the port of the running appliance of this container."""
    from appliance.address import reachable, read_address

    # A flag of `serve` may have changed the port, and other verbs do not see that flag.
    return read_address(settings.address_path) or (reachable(settings.host), settings.port)


def _key(_: argparse.Namespace, settings: Settings, __: Mapping[str, str]) -> int:
    from appliance.volume import open_volume, read_key, read_or_make_key

    key = read_key(settings.key_path)
    if not key:
        open_volume(settings.data_dir)
        key = read_or_make_key(settings.key_path)
    print(key)
    return 0


def _keys(options: argparse.Namespace, settings: Settings, _: Mapping[str, str]) -> int:
    from appliance.gateway.accounts.verbs import run
    from appliance.volume import open_volume

    if options.action != "list":
        open_volume(settings.data_dir)
    return run(options, settings.named_keys_path, settings.prompts_dir)


def _usage(options: argparse.Namespace, settings: Settings, _: Mapping[str, str]) -> int:
    from appliance.gateway.accounts.usage_store import UsageStore, usage_document
    from appliance.host.shared.usage import show_usage

    rows = UsageStore(settings.usage_path).read(options.days)
    show_usage(usage_document(rows, days=options.days, by=options.by), as_json=options.json)
    return 0


def _health(_: argparse.Namespace, settings: Settings, __: Mapping[str, str]) -> int:
    import http.client

    host, port = _address_of(settings)
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/health/ready")
        reply = connection.getresponse()
        print(reply.read().decode(errors="replace").strip())
    except OSError as error:
        print(f"no answer on port {port}: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    return 0 if reply.status == 200 else 1


def _version(options: argparse.Namespace, settings: Settings, _: Mapping[str, str]) -> int:
    from appliance.start.image import load_facts

    if not (settings.facts_dir / "image_facts.json").exists():  # outside an image
        return _on_the_host(["version", *(["--json"] if options.json else [])])
    image, engine = load_facts(settings)
    row = {
        "appliance": __version__,
        "cell": image.cell,
        "build_id": image.build_id,
        "engine": f"{image.engine} {engine.version} (build {engine.build}, commit {engine.commit})",
    }
    print(json.dumps(row) if options.json else "\n".join(f"{name}: {value}" for name, value in row.items()))
    return 0


def _engine_facts(options: argparse.Namespace, _: Settings, __: Mapping[str, str]) -> int:
    from pathlib import Path

    from appliance.engines.engine import read_facts
    from appliance.image_facts import dump_facts

    Path(options.out).write_text(dump_facts(read_facts(Path(options.bin), options.kv_pairs)), encoding="utf-8")
    return 0


def _show(error: FatalError) -> None:
    """Print the engine's last lines, then what failed, then the remedy: readers look at the end first."""
    for line in error.log[-40:]:
        print(f"  | {line}", file=sys.stderr)
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
