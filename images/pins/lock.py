"""images/locks/<name>.in -> <name>.txt, hash-locked by uv. Nothing else writes these files."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from images import docker
from images.errors import BuildError, MatrixError
from images.matrix.matrix import LOCKS, LockForm
from images.pins import lock_sums

# A lock is read on other machines: an address or a path in it would be this machine's.
FOREIGN = re.compile(
    r"^.*(?:[a-z+]+://|--(?:extra-)?index-url|--find-links|--trusted-host|(?:^|[\s'\"=@])/(?!/)\S).*$", re.MULTILINE
)
COMMON = ("--generate-hashes", "--no-header", "--quiet", "--python-version", "3.11")
FORMS: dict[LockForm, tuple[str, ...]] = {
    "wheels": ("--only-binary", ":all:", "--python-platform", "x86_64-manylinux_2_28"),
    "wheel": ("--no-deps", "--only-binary", ":all:"),  # one file, carried for what is inside it
    "sdist": ("--no-deps", "--no-binary", ":all:"),
    # Newer than the others: some of the wheels are made for glibc 2.31, and the images stand on 2.36.
    "engine": ("--only-binary", ":all:", "--python-platform", "x86_64-manylinux_2_36"),
    "engine-amd64": ("--only-binary", ":all:", "--python-platform", "x86_64-manylinux_2_36"),
}
# A lock holds the hashes of a release's every file. What may differ is which releases the other platform needs.
ALSO_FOR: dict[LockForm, str] = {"wheels": "aarch64-manylinux_2_28", "engine": "aarch64-manylinux_2_36"}


def uv_argv(
    name: str,
    form: LockForm,
    output: Path,
    *,
    ca_bundle: Path | None,
    upgrade: bool,
    overrides: Path | None = None,
    index_url: str | None = None,
) -> tuple[str, ...]:
    """Returns uv's command, for the project's root. Versions in `output` are kept unless `upgrade`.

    `overrides`: requirements that replace those of the wheels.
    """
    # By env, since uv has no flag for a file of certificates, and would write one for an index into the lock.
    given = {"SSL_CERT_FILE": ca_bundle, "UV_DEFAULT_INDEX": index_url}
    environment = [f"{variable}={value}" for variable, value in given.items() if value]
    source = (LOCKS / f"{name}.in").as_posix()
    return (
        *(("env", *environment) if environment else ()),
        *(sys.executable, "-m", "uv", "pip", "compile", *COMMON, *FORMS[form]),
        *(("--upgrade",) if upgrade else ()),
        *(("--override", overrides.as_posix()) if overrides else ()),
        *("--output-file", output.as_posix(), source),
    )


def lock(
    root: Path, name: str, form: LockForm, *, ca_bundle: Path | None, upgrade: bool, index_url: str | None = None
) -> bool:
    """Writes one lock, whole or not at all; True when it changed."""
    target = root / LOCKS / f"{name}.txt"
    with tempfile.TemporaryDirectory(prefix="lock-", dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        if target.exists():
            shutil.copyfile(target, fresh)
        path = LOCKS / f"{name}.overrides"
        overrides = path if (root / path).exists() else None
        argv = uv_argv(
            name, form, fresh, ca_bundle=ca_bundle, upgrade=upgrade, overrides=overrides, index_url=index_url
        )
        text = _compiled(root, name, argv, fresh)
        if form in ALSO_FOR:
            # The versions of the first stand in the output and are kept, so only a real difference shows.
            other = tuple(ALSO_FOR[form] if word == FORMS[form][-1] else word for word in argv if word != "--upgrade")
            refuse_differing(name, text, _compiled(root, name, other, fresh))
            fresh.write_text(text, "utf-8")
        refuse_foreign(name, text)
        refuse_unhashed(name, text)
        has_changed = not target.exists() or target.read_text("utf-8") != text
        fresh.replace(target)
    lock_sums.record(root, LOCKS / target.name)
    return has_changed


def faults(root: Path, name: str, form: LockForm, *, ca_bundle: Path | None, index_url: str | None = None) -> list[str]:
    """Returns a line for each unrequested or missing package and each hash that the index lacks. Nothing is written.

    uv is told the versions and not the hashes, which it would take over unasked.
    """
    target = root / LOCKS / f"{name}.txt"
    if not target.is_file():
        return [f"{name}: there is no lock"]
    committed = parse_pins(target.read_text("utf-8"))
    with tempfile.TemporaryDirectory(prefix="lock-", dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        fresh.write_text("".join(f"{pin}\n" for pin in committed), "utf-8")
        path = LOCKS / f"{name}.overrides"
        overrides = path if (root / path).exists() else None
        argv = uv_argv(name, form, fresh, ca_bundle=ca_bundle, upgrade=False, overrides=overrides, index_url=index_url)
        return [f"{name}: {line}" for line in differences(committed, parse_pins(_compiled(root, name, argv, fresh)))]


def differences(committed: Mapping[str, frozenset[str]], fresh: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Yields the differences. Only hashes that the index lacks count: a release may get files after it was locked."""
    for pin in sorted(set(committed) - set(fresh)):
        yield f"nothing asks for {pin}"
    for pin in sorted(set(fresh) - set(committed)):
        yield f"{pin} is missing"
    for pin in sorted(set(fresh) & set(committed)):
        for sha256 in sorted(committed[pin] - fresh[pin]):
            yield f"{pin}: no file of the index has SHA-256 {sha256}"


def parse_pins(text: str) -> dict[str, frozenset[str]]:
    """Returns the SHA-256 of each file, by `name==version` with its marker."""
    found: dict[str, frozenset[str]] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        pin, *hashes = re.split(r"\s+--hash=sha256:", line.strip())
        if pin and not pin.startswith("#"):
            found[pin] = frozenset(hashes)
    return found


def _compiled(root: Path, name: str, argv: tuple[str, ...], output: Path) -> str:
    done = docker.capture(argv, cwd=root)
    if done.code != 0:
        message = f"uv could not lock {name}: {' '.join(done.lines[-3:])}"
        raise BuildError(message, hint="behind an intercepting proxy give its certificates: --ca-bundle FILE")
    return output.read_text("utf-8")


def refuse_differing(name: str, text: str, other: str) -> None:
    """Raises BuildError if two platforms need other releases: one lock could then not install both."""
    pins, others = (set(re.findall(r"^\S+==\S+", each, re.MULTILINE)) for each in (text, other))
    if pins != others:
        message = f"lock {name} would not fit every platform, which differ in: {', '.join(sorted(pins ^ others))}"
        raise BuildError(message, hint="pin these in the .in file, or give the platforms locks of their own")


def refuse_foreign(name: str, text: str) -> None:
    """Raises BuildError if a line names an index, an address or a path of this machine."""
    found = FOREIGN.search(text)
    if found:
        message = f"lock {name} would hold an index address or a machine path: {found.group(0).strip()}"
        raise BuildError(message, hint="name packages and versions only in the .in file")


def refuse_unhashed(name: str, text: str) -> None:
    """Raises BuildError if a requirement has no version or no hash."""
    requirement = _unhashed(text)
    if requirement:
        message = f"lock {name} would hold a requirement without a hash: {requirement}"
        raise BuildError(message, hint="name packages and versions only in the .in file")


def refuse_unhashed_inputs(root: Path, paths: Iterable[Path]) -> None:
    """Raises MatrixError if a lock among a build's inputs holds something that could be another file tomorrow."""
    for path in paths:
        if path.parent != LOCKS or path.suffix != ".txt" or not (root / path).is_file():
            continue
        requirement = _unhashed((root / path).read_text("utf-8"))
        if requirement:
            message = f"{path} holds a requirement without a version or a hash: {requirement}"
            raise MatrixError(message, hint=f"python -m images lock {path.stem}")


def _unhashed(text: str) -> str | None:
    joined = re.sub(r"\\\n", " ", text)
    lines = (line.strip() for line in joined.splitlines())
    wanted = (line for line in lines if line and not line.startswith("#"))
    return next((line for line in wanted if not re.search(r"^\S+==\S+.*--hash=sha256:", line)), None)
