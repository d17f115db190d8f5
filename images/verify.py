"""Step 4: built image -> list[Check].

Evidence is gathered once, by starting the image as harshly as DESIGN.md section 5 allows and by reading its saved
layers; every check is then a pure function of it, so each has a test with a planted fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from appliance.image_facts import ENGINE_FACTS_PATH, IMAGE_FACTS_PATH, parse_engine_facts, parse_image_facts
from images import docker, render
from images.build import ARCHIVES, BASE_OVERRIDE_LABEL, BUILD_ID_LABEL
from images.errors import VerificationError
from images.matrix import Cell, Platform
from images.tree import Entry, Tree, parse_certificates, read_tree

SERVER = "/opt/llama/llama-server"
LIBRARY_FOLDER = "opt/appliance/lib/"
VARIANT = re.compile(r"^opt/llama/libggml-cpu-([a-z0-9_.-]+)\.so$")
BINARY_FOLDERS = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin")
TOOL = re.compile(
    r"^(?:[a-z0-9_]+-linux-gnu-)?(?:gcc|g\+\+|cc|c\+\+|cpp|clang(?:\+\+)?|ld|as|ar|make|cmake|ninja|nvcc|patch|pip\d?)"
    r"(?:-?[\d.]+)?$"
)
TOOL_PARTS = ("/cc1", "/cc1plus", "/dist-packages/pip/", "/site-packages/pip/", "/lib/pip/")
LEFTOVER = re.compile(
    r"^(?:var/lib/apt/lists/.+|var/cache/apt/.+\.(?:bin|deb)|var/cache/ldconfig/aux-cache|var/log/.+|tmp/.+|root/\..+|"
    r"var/(?:cache/debconf|lib/dpkg)/[a-z.]+-old)$"
)
KEPT_IN_HOME = ("root/.bashrc", "root/.profile")  # of the base
CREDENTIAL = re.compile(r"[a-z]+://[^/\s:\"]+:[^@/\s\"]+@|-----BEGIN [A-Z ]*PRIVATE KEY-----", re.IGNORECASE)
SECRET_NAME = re.compile(r"(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL)", re.IGNORECASE)
UNCHECKED_HASH = b"\x01\x00\x00\x00"  # flags of PEP 552: by hash, never compared with the source
SETUID_BITS = 0o6000


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    cell: Cell
    platform: Platform
    config: Mapping[str, Any]  # of the image, as the engine inspects it
    tree: Tree
    version: docker.Finished  # `appliance version`
    engine_version: docker.Finished  # `llama-server --version`
    secrets: frozenset[bytes] = frozenset()  # certificates that were lent to the build

    @property
    def labels(self) -> Mapping[str, str]:
        return self.config.get("Labels") or {}


def verify(root: Path, cell: Cell, engine: docker.Engine, *, image: str, ca_bundle: Path | None) -> list[Check]:
    """All checks of one image; VerificationError when there is no such image or it is not for this engine."""
    evidence = gather(root, cell, engine, image=image, ca_bundle=ca_bundle)
    return [check(evidence) for check in CHECKS]


def gather(root: Path, cell: Cell, engine: docker.Engine, *, image: str, ca_bundle: Path | None) -> Evidence:
    found = engine.image(image)
    if found is None:
        message = f"cell {cell.id} has no image here: {image}"
        raise VerificationError(message, hint=f"python -m images build --only {cell.id}")
    platform = next((platform for platform in cell.platforms if platform == engine.platform), None)
    if platform is None:
        message = f"cell {cell.id} cannot be verified here: the engine is {engine.platform}"
        raise VerificationError(message, hint=f"it is for {', '.join(cell.platforms)}")
    return Evidence(
        cell=cell,
        platform=platform,
        config=found.config,
        tree=_saved_tree(root, cell, engine, image),
        version=engine.run(image, ("version",)),
        engine_version=engine.run(image, ("--version",), entrypoint=(SERVER,)),
        secrets=frozenset(parse_certificates(ca_bundle.read_bytes()) if ca_bundle else ()),
    )


def _saved_tree(root: Path, cell: Cell, engine: docker.Engine, image: str) -> Tree:
    archive = root / ARCHIVES / f"{cell.id}.saved.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        engine.save(image, archive)
        return read_tree(archive)
    finally:
        archive.unlink(missing_ok=True)


def check_start(evidence: Evidence) -> Check:
    """As UID 12345 of group 0, read-only, without capabilities and without a network."""
    said = " ".join(evidence.version.lines[-3:])
    return Check(name="starts hardened", ok=evidence.version.code == 0, detail=f"exit {evidence.version.code}: {said}")


def check_engine_version(evidence: Evidence) -> Check:
    engine = evidence.cell.engine
    expected = f"version: {engine.version} (build {engine.build}, commit {engine.commit_short})"
    said = next((line for line in evidence.engine_version.lines if line.startswith("version:")), "no version line")
    return Check(
        name="engine is the pinned one",
        ok=evidence.engine_version.code == 0 and said == expected,
        detail=said if said == expected else f"{said}; expected {expected}",
    )


def check_cpu_variants(evidence: Evidence) -> Check:
    found = {match.group(1) for path in evidence.tree.files if (match := VARIANT.match(path))}
    expected = set(evidence.cell.engine.cpu_variants[evidence.platform].built)
    wrong = _difference("missing", expected - found) + _difference("not listed", found - expected)
    return Check(name="CPU variants", ok=not wrong, detail="; ".join(wrong) or f"{len(found)} as listed")


def check_no_tools(evidence: Evidence) -> Check:
    found = [entry.path for entry in evidence.tree.files.values() if entry.kind != "folder" and _is_tool(entry.path)]
    return _none_of("no compiler, no pip", found)


def check_no_leftovers(evidence: Evidence) -> Check:
    """Package lists, logs and caches cost space and carry times that no rebuild repeats."""
    files = [entry for entry in evidence.tree.files.values() if entry.kind == "file"]
    found = [entry.path for entry in files if LEFTOVER.match(entry.path) and not _is_of_base_home(evidence, entry)]
    return _none_of("no leftovers of apt", found)


def check_setuid(evidence: Evidence) -> Check:
    before = _setuid(evidence.tree.base)
    return _none_of("no setuid file beyond the base", sorted(_setuid(evidence.tree.files) - before))


def check_no_secret_files(evidence: Evidence) -> Check:
    """No private key in any layer, and no certificate that only the machine of the build has."""
    lent = evidence.secrets - evidence.tree.base_certificates
    leaks = [f"{place} (CA bundle)" for place, found in evidence.tree.certificates.items() if found & lent]
    return _none_of("no secret in a layer", evidence.tree.private_keys + leaks)


def check_no_secret_config(evidence: Evidence) -> Check:
    texts = [json.dumps(value) for value in evidence.config.values()]
    credentials = [match.group(0) for text in texts for match in CREDENTIAL.finditer(text)]
    names = [item.partition("=")[0] for item in evidence.config.get("Env") or ()]
    return _none_of(
        "no secret in the configuration", credentials + [name for name in names if SECRET_NAME.search(name)]
    )


def check_labels(evidence: Evidence) -> Check:
    labels = evidence.labels
    expected = render.static_labels(evidence.cell)
    if labels.get(BASE_OVERRIDE_LABEL, render.NONE) != render.NONE:
        # The build names the base that it really used.
        expected = {name: value for name, value in expected.items() if ".base." not in name}
    wrong = [f"{name}: {labels.get(name)}" for name, value in expected.items() if labels.get(name) != value]
    created = labels.get("org.opencontainers.image.created", "")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", created):
        wrong.append(f"org.opencontainers.image.created: {created}")
    wrong += [f"{name}: missing" for name in (BUILD_ID_LABEL, BASE_OVERRIDE_LABEL) if not labels.get(name)]
    return Check(name="labels", ok=not wrong, detail="; ".join(wrong) or f"{len(labels)} as rendered")


def check_engine_facts(evidence: Evidence) -> Check:
    name, engine = "engine facts", evidence.cell.engine
    try:
        facts = parse_engine_facts(_text(evidence.tree, ENGINE_FACTS_PATH))
    except ValueError as error:
        return Check(name=name, ok=False, detail=str(error))
    said = (facts.version, facts.build, facts.commit)
    commit_agrees = bool(facts.commit) and engine.commit.startswith(facts.commit)
    ok = commit_agrees and said[:2] == (engine.version, engine.build) and bool(facts.flags) and bool(facts.kv_types)
    return Check(name=name, ok=ok, detail=f"{said}, {len(facts.flags)} flags, {len(facts.kv_types)} KV types")


def check_image_facts(evidence: Evidence) -> Check:
    name, cell = "image facts", evidence.cell
    try:
        facts = parse_image_facts(_text(evidence.tree, IMAGE_FACTS_PATH))
    except ValueError as error:
        return Check(name=name, ok=False, detail=str(error))
    label = evidence.labels.get(BUILD_ID_LABEL)
    wrong = _difference("build id is not the label's", {facts.build_id} - {label or ""})
    wrong += _difference("cell", {facts.cell} - {cell.id}) + _difference(
        "commit", {facts.engine_commit} - {cell.engine.commit}
    )
    return Check(name=name, ok=not wrong, detail="; ".join(wrong) or f"build id {facts.build_id}")


def check_volume(evidence: Evidence) -> Check:
    """Group 0 may write: a new named volume takes these, and then any UID of group 0 can use it."""
    data = evidence.tree.files.get("data")
    seen = (data.uid, data.gid, oct(data.mode)) if data else None
    is_declared = "/data" in (evidence.config.get("Volumes") or {})
    ok = seen == (0, 0, "0o775") and is_declared
    return Check(name="/data", ok=ok, detail=f"{seen}, {'a volume' if is_declared else 'not a volume'}")


def check_user(evidence: Evidence) -> Check:
    user = str(evidence.config.get("User") or "root")
    return Check(name="user is not root", ok=user.partition(":")[0] not in ("0", "root"), detail=user)


def check_run_line(evidence: Evidence) -> Check:
    """What `docker run` relies on: entry point, health check, port, stop signal."""
    config = evidence.config
    expected: dict[str, object] = {
        "Entrypoint": ["/usr/bin/tini", "--", "appliance"],
        "Cmd": ["serve"],
        "StopSignal": "SIGTERM",
        "ExposedPorts": {"11435/tcp": {}},
    }
    wrong = [f"{name}: {config.get(name)}" for name, value in expected.items() if config.get(name) != value]
    health = (config.get("Healthcheck") or {}).get("Test")
    if health != ["CMD", "appliance", "health"]:
        wrong.append(f"Healthcheck: {health}")
    return Check(name="run line", ok=not wrong, detail="; ".join(wrong) or "as promised")


def check_byte_code(evidence: Evidence) -> Check:
    """Without it a read-only container compiles its imports at every start; with times in it no rebuild is the same."""
    files = evidence.tree.files
    sources = [path for path in files if path.startswith(LIBRARY_FOLDER) and path.endswith(".py")]
    missing = [path for path in sources if _byte_code(path) not in files]
    code = [entry for entry in files.values() if entry.path.endswith(".pyc")]
    checked = [entry.path for entry in code if entry.content[4:8] != UNCHECKED_HASH]
    wrong = _difference("without byte code", missing) + _difference("checked or timed", checked)
    ok = bool(sources) and not wrong
    return Check(name="byte code", ok=ok, detail="; ".join(wrong) or f"{len(code)} files, {len(sources)} of ours")


def check_size(evidence: Evidence) -> Check:
    size_mib = evidence.tree.size_bytes / 2**20
    budget_mib = evidence.cell.size_budget_mib
    return Check(name="size", ok=size_mib <= budget_mib, detail=f"{size_mib:.0f} MiB of {budget_mib} MiB")


CHECKS: tuple[Callable[[Evidence], Check], ...] = (
    check_start,
    check_engine_version,
    check_cpu_variants,
    check_no_tools,
    check_no_leftovers,
    check_setuid,
    check_no_secret_files,
    check_no_secret_config,
    check_labels,
    check_engine_facts,
    check_image_facts,
    check_volume,
    check_user,
    check_run_line,
    check_byte_code,
    check_size,
)


def _is_tool(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return (folder in BINARY_FOLDERS and bool(TOOL.match(name))) or any(part in f"/{path}" for part in TOOL_PARTS)


def _is_of_base_home(evidence: Evidence, entry: Entry) -> bool:
    return entry.path in KEPT_IN_HOME and entry.path in evidence.tree.base


def _setuid(files: Mapping[str, Entry]) -> set[str]:
    return {entry.path for entry in files.values() if entry.kind == "file" and entry.mode & SETUID_BITS}


def _byte_code(path: str) -> str:
    source = PurePosixPath(path)
    return (source.parent / "__pycache__" / f"{source.stem}.cpython-311.pyc").as_posix()


def _text(tree: Tree, path: str) -> str:
    entry = tree.files.get(path.lstrip("/"))
    if entry is None:
        message = f"missing: {path}"
        raise ValueError(message)
    return entry.content.decode("utf-8")


def _none_of(name: str, found: list[str]) -> Check:
    return Check(name=name, ok=not found, detail=", ".join(found[:5]) + _more(found) if found else "none")


def _difference(what: str, found: Iterable[str]) -> list[str]:
    names = sorted(found)
    return [f"{what}: {', '.join(names[:5])}{_more(names)}"] if names else []


def _more(found: list[str]) -> str:
    return f" and {len(found) - 5} more" if len(found) > 5 else ""
