"""Compares an image's files with the manifest of its build, and finds settings that would run other code. Pure.

The build writes the hash of every file to `MANIFEST` when all but the image's own facts is there, and the hash of that
into a label. Who changes a file afterwards, in a layer of their own or in one of ours, is found out unless they rewrite
manifest and label too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from appliance.image_facts import BAKED_MODELS_PATH, ENGINE_FACTS_PATH, IMAGE_FACTS_PATH, RECIPE_PATH
from images.layers.tree import Entry, Tree

MANIFEST = "opt/appliance/files.sha256"
# What sha256sum prints. Of a name with a backslash or a line end in it, it escapes these and begins with a backslash.
LINE = re.compile(r"^(\\?)([0-9a-f]{64})  /(.+)$", re.MULTILINE)
# Written after the manifest: the build's identity, and the additions of a model image.
LATER = tuple(path.lstrip("/") for path in (IMAGE_FACTS_PATH, RECIPE_PATH))
ENGINES = "opt/"
WEIGHTS = f"{BAKED_MODELS_PATH.lstrip('/')}/"
# The engine mounts its own files over these during a build, so they cannot be compared.
MOUNTED = ("etc/hosts", "etc/hostname", "etc/resolv.conf")
ACCOUNTS = "etc/passwd"
# Files that the dynamic linker loads into every program, its search paths, and variables that change both.
LINKER_ENVIRONMENT = re.compile(r"^(?:LD_\w+|GLIBC_TUNABLES|GCONV_PATH)=")
LINKER_FILES = re.compile(r"^etc/ld\.so\.(?:preload|conf(?:\.d/.+)?)$")
CODE_FOLDERS = ("opt/", "usr/", "etc/", "bin/", "sbin/", "lib/", "lib64/")
WRITABLE_BITS = 0o022  # the container's user is of group 0


def changed(tree: Tree, label: str | None) -> list[str]:
    """Returns a line for each file that changed since the build. `label`: the manifest's hash by the image's label."""
    manifest = tree.files.get(MANIFEST)
    if manifest is None:
        return [f"no manifest: {MANIFEST}"]
    facts = tree.files.get(ENGINE_FACTS_PATH.lstrip("/"))
    if facts is None or facts.layer != manifest.layer:
        return [f"the manifest is of another layer than the facts that the build wrote with it: {MANIFEST}"]
    if manifest.sha256 != label:
        return [f"the manifest is not the one of the image's label: {manifest.sha256}, {label or 'no label'}"]
    written = parse_manifest(manifest.content.decode("utf-8", "replace"))
    return sorted([*_differing(tree, written), *_added(tree, written, manifest.layer)])


def parse_manifest(text: str) -> dict[str, str]:
    """Parses the manifest: path without the leading slash -> SHA-256."""
    return {
        path.replace("\\n", "\n").replace("\\\\", "\\") if escaped else path: sha256
        for escaped, sha256, path in LINE.findall(text)
    }


def _differing(tree: Tree, written: Mapping[str, str]) -> Iterator[str]:
    for path, sha256 in written.items():
        entry = tree.files.get(path)
        if path in MOUNTED or path in LATER:
            continue
        if entry is None or entry.kind != "file":
            yield f"gone: {path}"
        elif entry.sha256 != sha256:
            yield f"changed: {path}"


def _added(tree: Tree, written: Mapping[str, str], layer: int) -> Iterator[str]:
    """Yields files that the manifest lacks, and links that came after it."""
    for path, entry in tree.files.items():
        is_new = path not in written if entry.kind == "file" else entry.kind != "folder" and entry.layer > layer
        if is_new and path not in (*LATER, *MOUNTED, MANIFEST) and not path.startswith(WEIGHTS):
            yield f"added: {path}"


def astray(tree: Tree) -> list[str]:
    """Returns a line for each link below /opt, or to it, that leads to another name than its own.

    A library's link leads to a longer version next to it, `lib64` to `lib`. A link from elsewhere has its target's
    name.
    """
    return sorted(f"{path} -> {entry.target}" for path, entry in tree.files.items() if _is_astray(tree, path, entry))


def _is_astray(tree: Tree, path: str, entry: Entry) -> bool:
    folder, _, name = path.rpartition("/")
    is_inside = path.startswith(ENGINES)
    if entry.kind != "link" or path.startswith(WEIGHTS) or not (is_inside or entry.target.startswith(f"/{ENGINES}")):
        return False
    found = tree.files.get(f"{folder}/{entry.target}" if is_inside else entry.target.lstrip("/"))
    if found is None:
        return True
    if not is_inside:
        return found.path.rpartition("/")[2] != name
    is_longer, is_lib64 = entry.target.startswith(f"{name}."), found.kind == "folder" and name.startswith(entry.target)
    return "/" in entry.target or not (is_longer or is_lib64)


def preloaded(tree: Tree, environment: Sequence[str]) -> list[str]:
    """Returns the settings that make the dynamic linker load code that the program does not ask for."""
    names = [line.partition("=")[0] for line in environment if LINKER_ENVIRONMENT.match(line)]
    files = [path for path, entry in tree.files.items() if LINKER_FILES.match(path) and not _is_of_base(tree, entry)]
    return [f"{name} in the environment" for name in names] + sorted(files)


def roots(tree: Tree) -> list[str]:
    """Returns users other than root with UID 0."""
    entry = tree.files.get(ACCOUNTS)
    if entry is None:
        return [f"missing: {ACCOUNTS}"]
    rows = [line.split(":") for line in entry.content.decode("utf-8", "replace").splitlines()]
    broken = [f"not a line of it: {':'.join(row)}" for row in rows if len(row) != 7 or not row[2].isdecimal()]
    return broken + [row[0] for row in rows if len(row) == 7 and row[2].isdecimal() and int(row[2]) == 0][1:]


def writable(tree: Tree) -> list[str]:
    """Returns code that the container's user could replace, by its mode or its owner."""
    return sorted(
        f"{path} ({entry.mode:o}, UID {entry.uid})"
        for path, entry in tree.files.items()
        if f"{path}/".startswith(CODE_FOLDERS)
        and entry.kind in ("file", "folder")
        and (entry.mode & WRITABLE_BITS or entry.uid)
        and not _is_of_base(tree, entry)
    )


def _is_of_base(tree: Tree, entry: Entry) -> bool:
    return tree.base.get(entry.path) == entry
