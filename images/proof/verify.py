"""Step 4: built image -> list[Check].

ImageSnapshot is gathered once, by starting the image as harshly as DESIGN.md section 5 allows and by reading its saved
layers; every check is then a pure function of it, so each has a test with a planted fault.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from appliance.image_facts import (
    ENGINE_FACTS_PATH,
    IMAGE_FACTS_PATH,
    ImageFacts,
    parse_engine_facts,
    parse_image_facts,
)
from images import docker
from images.build import build, model, packages
from images.build.build import (
    ARCHIVES,
    BASE_OVERRIDE_LABEL,
    BUILD_ID_LABEL,
    RECIPE_LABEL,
    REPRODUCIBLE_LABEL,
    REVISION_LABEL,
    TOOLKIT_OVERRIDE_LABEL,
)
from images.errors import BuildError, VerificationError
from images.layers import integrity
from images.layers.leaks import leaks as secret_forms
from images.layers.tree import Entry, Extraction, Tree, parse_certificates, read_tree
from images.matrix import compat, render
from images.matrix.engines import EngineFiles
from images.matrix.matrix import Cell, Platform
from images.pins import debian, web_lock
from images.proof import configured, cpu_kernels, cublas_jit, environment, gate, libraries, licenses, wheel_gaps
from images.recipes import recipe

VARIANT = re.compile(rf"^{cpu_kernels.FOLDER[1:]}/libggml-cpu-([a-z0-9_.-]+)\.so$")
BINARY_FOLDERS = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin")
TOOL = re.compile(
    r"^(?:[a-z0-9_]+-linux-gnu-)?(?:gcc|g\+\+|cc|c\+\+|cpp|clang(?:\+\+)?|ld|as|ar|make|cmake|ninja|nvcc|patch|pip\d?)"
    r"(?:-?[\d.]+)?$"
)
# Libraries of the driver, which the container runtime mounts: a copy in the image would be loaded instead.
DRIVER = re.compile(r"(?:^|/)lib(?:cuda|cudadebugger|nvcuvid|nvidia-[\w-]+)\.so(?:\.|$)")
CUDA_TOOLKIT = re.compile(
    r"(?:^|/)(?:nvcc|ptxas|cicc|cudafe\+\+|fatbinary|nvlink|bin2c|cuobjdump|nvdisasm|tileiras|nvcc\.profile|"
    r"libnvvm\.so[\d.]*|libdevice\.\d+\.bc|libcu[\w]+\.a)$"
)
HEADER = re.compile(r"\.(?:h|hh|hpp|cuh|inl)$")
GPU_BACKEND = re.compile(r"(?:^|/)libggml-(?:cuda|hip|musa)\.so$")
ELF_MACHINES: Mapping[Platform, int] = {"linux/amd64": 62, "linux/arm64": 183}
# For linking programs of another platform, which the folder names.
STUB = re.compile(r"^opt/vllm/lib/nvidia_cutlass_dsl/cu\d+/lib/stubs/(?P<of>aarch64|x86_64)-[^/]+/[^/]+\.so$")
STUB_MACHINES = {"x86_64": 62, "aarch64": 183}
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
STATUS = "var/lib/dpkg/status"


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class ImageSnapshot:
    cell: Cell
    platform: Platform
    config: Mapping[str, Any]  # configuration of the image in the engine's form
    tree: Tree
    version: docker.Finished  # `appliance version`
    engine_version: docker.Finished  # the engine's version output
    secrets: frozenset[bytes] = frozenset()  # certificates that were lent to the build
    kernels: tuple[gate.Report, ...] = ()  # for a CUDA cell, one for each chip
    jit: docker.Finished | None = None  # for a cell whose cuBLAS compiles when it runs
    cpu_kernels: cpu_kernels.Report | None = None  # for an engine with CPU variants
    linked: libraries.Answers | str = "the image's loader was not asked"
    debian: debian.Lock | None = None  # lock of its base, or its temporary one
    asked: str = ""  # packages that the runtime stage asks for: a part of that lock
    build_id: str = ""  # build id that this tree gives the image, with its base and packages
    revision: build.Judged | None = None  # verdict on the label; None: the image is of another tree
    web: tuple[web_lock.WebLibrary, ...] = ()  # libraries of the pages, by this tree's lock
    recipe: recipe.RecipeRow | None = None  # recipe of this tree that the image's label names
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of base and Dockerfile
    configured: Mapping[str, object] = field(default_factory=dict)  # configuration for `docker run`, by the Dockerfile

    @property
    def engine_files(self) -> EngineFiles:
        return self.cell.engine.files

    @property
    def labels(self) -> Mapping[str, str]:
        return self.config.get("Labels") or {}


def verify(
    root: Path,
    cell: Cell,
    engine: docker.Engine,
    *,
    image: str,
    ca_bundle: Path | None,
    cuobjdump: Path | None = None,
) -> list[Check]:
    """Runs all checks of one image. Raises VerificationError if it is not here, BuildError for another platform."""
    snapshot = gather(root, cell, engine, image=image, ca_bundle=ca_bundle, cuobjdump=cuobjdump)
    return [check(snapshot) for check in CHECKS]


def refuse_absent(cells: Iterable[Cell], engine: docker.Engine, *, image: str | None) -> None:
    """Raises VerificationError naming every cell without an image, before minutes are spent on the others."""
    absent = [cell for cell in cells if engine.image(image or cell.tag) is None]
    if absent:
        raise _absent(absent, image)


def _absent(cells: Sequence[Cell], image: str | None) -> VerificationError:
    names = ", ".join(cell.id for cell in cells)
    if len(cells) == 1:
        message = f"cell {names} has no image here: {image or cells[0].tag}"
        return VerificationError(message, hint=f"python -m images build --only {names}")
    message = f"{len(cells)} cells have no image here: {names}"
    return VerificationError(message, hint="build them, or name one that is here: --only CELL")


def gather(
    root: Path, cell: Cell, engine: docker.Engine, *, image: str, ca_bundle: Path | None, cuobjdump: Path | None
) -> ImageSnapshot:
    found = engine.image(image)
    if found is None:
        raise _absent((cell,), image)
    platform = own_platform(cell, image, engine_platform=engine.platform, image_platform=found.platform)
    gpu_files = cell.engine.files.gpu_files if cell.target.cuda else None
    with tempfile.TemporaryDirectory(prefix="verify-", dir=_archives(root)) as folder:
        tree = _saved_tree(Path(folder), engine, image, gpu_files=gpu_files)
        kernels = _judge_kernels(root, cell, platform, tree, cuobjdump) if cell.target.cuda else ()
    lock = packages.lock_of(root, cell, platform, found.labels)
    dockerfile = (root / cell.folder / "Dockerfile").read_text("utf-8")
    build_id = packages.build_id_of(root, cell, platform, found.labels)
    is_of_tree = found.labels.get(BUILD_ID_LABEL) == build_id
    return ImageSnapshot(
        cell=cell,
        platform=platform,
        config=found.config,
        tree=tree,
        version=engine.run(image, ("version",)),
        engine_version=_ask_version(cell, engine, image),
        linked=libraries.query(engine, image),
        secrets=frozenset(parse_certificates(ca_bundle.read_bytes()) if ca_bundle else ()),
        kernels=kernels,
        jit=_compile(cell, engine, image),
        cpu_kernels=_execute_variants(root, cell, platform, engine, image),
        debian=lock,
        asked=debian.asked(dockerfile).get("runtime", ""),
        build_id=build_id,
        revision=build.query_revision(root, cell, found.labels.get(REVISION_LABEL), lock=lock) if is_of_tree else None,
        web=web_lock.libraries(root),
        recipe=_recipe_of(root, found.labels),
        configured=configured.given(dockerfile),
        environment=environment.given(
            dockerfile,
            _environment_of(engine, packages.stood_on(cell, found.labels)[0]),
            {"APPLIANCE_BUILD_ID": found.labels.get(BUILD_ID_LABEL, "")},
        ),
    )


def _ask_version(cell: Cell, engine: docker.Engine, image: str) -> docker.Finished:
    binary, *arguments = cell.engine.files.version_argv or (cell.engine.files.binary, "--version")
    return engine.run(image, tuple(arguments), entrypoint=(binary,))


def _compile(cell: Cell, engine: docker.Engine, image: str) -> docker.Finished | None:
    libraries = compat.jit_libraries(cell)
    return cublas_jit.query(engine, image, libraries[0], cell.forms) if libraries else None


def _recipe_of(root: Path, labels: Mapping[str, str]) -> recipe.RecipeRow | None:
    name = labels.get(RECIPE_LABEL)
    return recipe.load(root, name) if name in recipe.names(root) else None


def _environment_of(engine: docker.Engine, base: str) -> Sequence[str]:
    """Returns the variables of a base, by its digest; none if it is not here, as after a fetch by BuildKit."""
    found = engine.image(base)
    return (found.config.get("Env") or ()) if found else ()


def _execute_variants(
    root: Path, cell: Cell, platform: Platform, engine: docker.Engine, image: str
) -> cpu_kernels.Report | None:
    variants = cell.engine.cpu_variants.get(platform)
    if variants is None:
        return None
    base = cell.base.image if engine.image(cell.base.image) else image
    tag = f"appliance-emulator:{cell.id}"
    return cpu_kernels.query(root, engine, image=image, tag=tag, base=base, variants=variants)


def own_platform(cell: Cell, image: str, *, engine_platform: str, image_platform: str) -> Platform:
    """Returns the engine's platform if cell and image are for it. Raises BuildError otherwise: they could not start."""
    for what, platforms in (("cell", cell.platforms), (f"image {image}", (image_platform,))):
        if engine_platform not in platforms:
            message = f"cell {cell.id} cannot be verified here: the engine is {engine_platform}"
            raise BuildError(message, hint=f"the {what} is for {', '.join(platforms)}")
    return next(platform for platform in cell.platforms if platform == engine_platform)


def _archives(root: Path) -> Path:
    folder = root / ARCHIVES
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _saved_tree(folder: Path, engine: docker.Engine, image: str, *, gpu_files: re.Pattern[str] | None) -> Tree:
    """Reads the image through `folder`; the libraries of a CUDA cell stay there for cuobjdump."""
    archive = folder / "saved.tar"
    engine.save(image, archive)
    tree = read_tree(archive, extraction=Extraction(pattern=gpu_files, folder=folder) if gpu_files else None)
    archive.unlink()
    return tree


def _judge_kernels(
    root: Path, cell: Cell, platform: Platform, tree: Tree, cuobjdump: Path | None
) -> tuple[gate.Report, ...]:
    """Judges every kernel for every chip of the cell on this platform."""
    tool = gate.find_tool(cuobjdump)
    libraries = [gate.query_library(tool, file, name=path) for path, file in sorted(tree.extracted.items())]
    reports = []
    for sm in (form.sm for form in cell.sm_forms if form.is_for(platform)):
        gaps = root / wheel_gaps.path_for(cell, sm)
        known = gate.load_known_gaps(gaps, platform) if gaps.exists() else None
        reports.append(gate.judge(libraries, int(sm), known))
    return tuple(reports)


def check_start(snapshot: ImageSnapshot) -> Check:
    """Starts the image as UID 12345 of group 0, read-only, without capabilities and without a network."""
    said = " ".join(snapshot.version.lines[-3:])
    return Check(name="starts hardened", ok=snapshot.version.code == 0, detail=f"exit {snapshot.version.code}: {said}")


def check_engine_version(snapshot: ImageSnapshot) -> Check:
    engine = snapshot.cell.engine
    form = snapshot.engine_files.version_line
    expected = form.format(version=engine.version, build=engine.build, commit=engine.commit_short)
    lines = reversed(snapshot.engine_version.lines)  # warnings of a machine without a GPU come first
    said = next((line for line in lines if line.startswith(form.partition("{")[0])), "no version line")
    return Check(
        name="engine is the pinned one",
        ok=snapshot.engine_version.code == 0 and said == expected,
        detail=said if said == expected else f"{said}; expected {expected}",
    )


def check_cpu_variants(snapshot: ImageSnapshot) -> Check:
    found = {match.group(1) for path in snapshot.tree.files if (match := VARIANT.match(path))}
    variants = snapshot.cell.engine.cpu_variants.get(snapshot.platform)
    expected = set(variants.built if variants else ())
    wrong = _difference("missing", expected - found) + _difference("not listed", found - expected)
    return Check(name="CPU variants", ok=not wrong, detail="; ".join(wrong) or f"{len(found)} as listed")


def check_cpu_kernels(snapshot: ImageSnapshot) -> Check:
    """Checks that each runnable CPU variant computes what the baseline computes; others are named."""
    name, report = "CPU kernels compute", snapshot.cpu_kernels
    if report is None:
        ok = not snapshot.cell.engine.cpu_variants
        return Check(name=name, ok=ok, detail="no variants" if ok else "nothing was executed")
    return Check(name=name, ok=not report.faults, detail="; ".join(report.faults) or report.describe())


def check_kernels(snapshot: ImageSnapshot) -> Check:
    """Checks that every kernel compiled here has machine code for each chip; NVIDIA's libraries are only listed."""
    name, reports = "kernels run natively", snapshot.kernels
    if snapshot.cell.target.cuda is None:
        backends = [path for path in snapshot.tree.files if GPU_BACKEND.search(path)]
        return Check(name=name, ok=not backends, detail=f"no GPU in this cell{_colon(backends)}")
    several = len(snapshot.cell.sms) > 1
    faults = [f"SM {report.sm}: {fault}" if several else fault for report in reports for fault in report.faults]
    if faults or not reports:
        return Check(name=name, ok=False, detail="; ".join(faults[:5]) + _more(faults) or "no kernel was judged")
    lines = [
        gate.describe(library, report.sm)
        for report in reports
        for library in report.libraries
        if library.kernels or library.targets
    ]
    return Check(name=name, ok=True, detail="; ".join(lines))


def check_jit(snapshot: ImageSnapshot) -> Check:
    """Checks nvrtc, which cuBLAS opens by itself: an image with half of it fails at the first kernel that needs it."""
    name, expected, ran = "cuBLAS can compile", compat.jit_libraries(snapshot.cell), snapshot.jit
    missing = [each for each in expected if f"{cublas_jit.FOLDER[1:]}/{each}" not in snapshot.tree.files]
    if not expected:
        return Check(name=name, ok=ran is None, detail="it opens no compiler")
    if ran is None or missing:
        return Check(name=name, ok=False, detail="; ".join(_difference("missing", missing)) or "it was not tried")
    detail = ", ".join(ran.lines[-3:])
    return Check(name=name, ok=ran.code == 0, detail=f"{expected[0]}: {detail}")


def check_platform(snapshot: ImageSnapshot) -> Check:
    """Checks the files' own platform: BuildKit labels a foreign one without looking at them."""
    machine = ELF_MACHINES[snapshot.platform]
    files = snapshot.tree.files.values()
    compiled = [entry for entry in files if entry.machine is not None and entry.path not in snapshot.tree.base]
    ours = [entry for entry in compiled if not _is_stub(entry)]
    foreign = [f"{entry.path} (ELF machine {entry.machine})" for entry in ours if entry.machine != machine]
    stubs = f", {len(compiled) - len(ours)} stubs" if len(compiled) > len(ours) else ""
    detail = f"{snapshot.platform}, {len(ours)} ELF files{stubs}{_colon(foreign)}"
    return Check(name="platform", ok=bool(ours) and not foreign, detail=detail)


def _is_stub(entry: Entry) -> bool:
    found = STUB.search(entry.path)
    return found is not None and STUB_MACHINES[found["of"]] == entry.machine


def check_libraries(snapshot: ImageSnapshot) -> Check:
    """Checks that the loader finds every library, and was asked about as many files as the layers have."""
    name, answers = "every library is found", snapshot.linked
    if isinstance(answers, str):
        return Check(name=name, ok=False, detail=answers)
    files = [each for each in snapshot.tree.files.values() if each.machine is not None and _is_linked(each)]
    names = {PurePosixPath(each.path).name for each in files}
    has_cuda = snapshot.cell.target.cuda is not None
    asked = answers.asked + len(answers.static)
    wrong = libraries.faults(answers, names, libraries.load_known(), has_cuda=has_cuda)
    if not files or asked != len(files):
        wrong.insert(0, f"the loader was asked of {asked} files, and the layers have {len(files)}")
    detail = "; ".join(wrong[:5]) + _more(wrong) if wrong else libraries.describe(answers, names)
    return Check(name=name, ok=not wrong, detail=detail)


def _is_linked(entry: Entry) -> bool:
    is_there = entry.path.startswith(tuple(f"{folder}/" for folder in libraries.FOLDERS))
    is_loaded = bool(libraries.LIBRARY.search(entry.path)) or entry.mode & 0o111 == 0o111
    return is_there and is_loaded and libraries.STUBS not in f"/{entry.path}"


def check_no_driver(snapshot: ImageSnapshot) -> Check:
    return _none_of("no driver library", [path for path in snapshot.tree.files if DRIVER.search(path)])


def check_tools(snapshot: ImageSnapshot) -> Check:
    """Checks compiler, toolkit and headers against the engine's row, which has none for an engine that only runs."""
    own = snapshot.engine_files
    files = [entry.path for entry in snapshot.tree.files.values() if entry.kind != "folder"]
    tools = [path for path in files if (_is_tool(path) or CUDA_TOOLKIT.search(path)) and not _on(own.tools, path)]
    added = [path for path in files if HEADER.search(path) and path not in snapshot.tree.base]
    headers = [path for path in added if not _on(own.headers, path)]
    missing = [each.pattern for each in own.needed if not any(each.match(path) for path in files)]
    wrong = _difference("tools", tools) + _difference("headers", headers) + _difference("missing", missing)
    return Check(name="compiler, toolkit, headers", ok=not wrong, detail="; ".join(wrong) or "as the engine needs")


def check_licenses(snapshot: ImageSnapshot) -> Check:
    """Checks license texts of this project, the engine and its parts, each wheel, and CUDA's libraries."""
    title, folders = snapshot.cell.engine.title, snapshot.engine_files.wheel_folders
    found = licenses.look(snapshot.tree.files, engine=title, folders=folders)
    wrong = _difference("missing", found.missing) + _difference(
        "has a text by now, and is listed as without", found.outdated
    )
    silent = f"; none is to be had of {', '.join(found.silent)}" if found.silent else ""
    detail = "; ".join(wrong) or f"engine and {found.wheels} wheels{silent}"
    return Check(name="license texts", ok=bool(found.wheels) and not wrong, detail=detail)


def check_web(snapshot: ImageSnapshot) -> Check:
    """Checks the libraries of the pages: exactly the files of the lock, each with its hash, and their license texts."""
    locked = {f"{web_lock.FOLDER}{file.name}": file.sha256 for library in snapshot.web for file in library.files}
    found = {path: each for path, each in snapshot.tree.files.items() if path.startswith(web_lock.FOLDER)}
    texts = [f"{licenses.FOLDER}{library.folder}/LICENSE" for library in snapshot.web]
    wrong = [
        *_difference("missing", [path for path in (*locked, *texts) if path not in snapshot.tree.files]),
        *_difference("in no lock", [path for path in found if path not in locked]),
        *_difference("changed", [path for path, each in found.items() if locked.get(path, each.sha256) != each.sha256]),
    ]
    return Check(
        name="page libraries", ok=bool(locked) and not wrong, detail="; ".join(wrong) or f"{len(locked)} files"
    )


def check_gpu_environment(snapshot: ImageSnapshot) -> Check:
    """Checks GPU variables: NVIDIA_VISIBLE_DEVICES is the user's; capabilities are compute and utility."""
    pairs = (str(item).partition("=") for item in snapshot.config.get("Env") or ())
    environment = {name: value for name, _, value in pairs if name.startswith("NVIDIA_")}
    expected = "compute,utility" if snapshot.cell.target.cuda else None
    said = environment.get("NVIDIA_DRIVER_CAPABILITIES")
    wrong = [] if said == expected else [f"NVIDIA_DRIVER_CAPABILITIES={said}, expected {expected}"]
    if "NVIDIA_VISIBLE_DEVICES" in environment:
        wrong.append(f"NVIDIA_VISIBLE_DEVICES={environment['NVIDIA_VISIBLE_DEVICES']}")
    return Check(name="GPU environment", ok=not wrong, detail="; ".join(wrong) or f"capabilities: {said}")


def check_environment(snapshot: ImageSnapshot) -> Check:
    """Checks that the variables are exactly those of base and Dockerfile: PATH decides what starts."""
    found = environment.differing(snapshot.config.get("Env") or (), snapshot.environment)
    detail = "; ".join(found[:5]) + _more(found) if found else f"{len(snapshot.environment)} of base and Dockerfile"
    return Check(name="environment", ok=not found, detail=detail)


def check_no_leftovers(snapshot: ImageSnapshot) -> Check:
    """Checks for package lists, logs and caches: they cost space and have times that no rebuild repeats."""
    files = [entry for entry in snapshot.tree.files.values() if entry.kind == "file"]
    found = [entry.path for entry in files if LEFTOVER.match(entry.path) and not _is_of_base_home(snapshot, entry)]
    return _none_of("no leftovers of apt", found)


def check_setuid(snapshot: ImageSnapshot) -> Check:
    before = _setuid(snapshot.tree.base)
    return _none_of("no setuid file beyond the base", sorted(_setuid(snapshot.tree.files) - before))


def check_no_secret_files(snapshot: ImageSnapshot) -> Check:
    """Checks every layer for private keys, tokens, passwords, and certificates of the build machine."""
    lent = snapshot.secrets - snapshot.tree.base_certificates
    leaks = [f"{place} (CA bundle)" for place, found in snapshot.tree.certificates.items() if found & lent]
    return _none_of("no secret in a layer", [*snapshot.tree.private_keys, *snapshot.tree.secrets, *leaks])


def check_no_secret_config(snapshot: ImageSnapshot) -> Check:
    texts = [json.dumps(value) for value in snapshot.config.values()]
    texts += _history(snapshot.tree)
    credentials = [match.group(0) for text in texts for match in CREDENTIAL.finditer(text)]
    names = [item.partition("=")[0] for item in snapshot.config.get("Env") or ()]
    named = [name for name in names if SECRET_NAME.search(name)]
    forms = dict.fromkeys(name for text in texts for name in secret_forms(text.encode()))
    return _none_of("no secret in the configuration", [*credentials, *named, *forms])


def _history(tree: Tree) -> list[str]:
    """Returns the command of each layer by the image's history."""
    try:
        steps = json.loads(tree.configuration or b"{}").get("history") or ()
        return [str(step.get("created_by", "")) for step in steps]
    except (ValueError, AttributeError, TypeError):
        return [tree.configuration.decode("utf-8", "replace")]


def check_labels(snapshot: ImageSnapshot) -> Check:
    labels = snapshot.labels
    expected = render.static_labels(snapshot.cell)
    if RECIPE_LABEL in labels:  # a model image has the name of its own tag
        expected = {name: value for name, value in expected.items() if name != model.TITLE_LABEL}
    if labels.get(BASE_OVERRIDE_LABEL, render.NONE) != render.NONE:
        # The build names the base that it really used.
        expected = {name: value for name, value in expected.items() if ".base." not in name}
    if TOOLKIT_OVERRIDE_LABEL in labels:  # likewise the toolkit
        expected = {**expected, render.TOOLKIT_SOURCE_LABEL: labels[TOOLKIT_OVERRIDE_LABEL]}
    wrong = [f"{name}: {labels.get(name)}" for name, value in expected.items() if labels.get(name) != value]
    created = labels.get("org.opencontainers.image.created", "")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", created):
        wrong.append(f"org.opencontainers.image.created: {created}")
    wrong += [f"{name}: missing" for name in (BUILD_ID_LABEL, BASE_OVERRIDE_LABEL) if not labels.get(name)]
    return Check(name="labels", ok=not wrong, detail="; ".join(wrong) or f"{len(labels)} as rendered")


def check_engine_facts(snapshot: ImageSnapshot) -> Check:
    name, engine = "engine facts", snapshot.cell.engine
    try:
        facts = parse_engine_facts(_text(snapshot.tree, ENGINE_FACTS_PATH))
    except ValueError as error:
        return Check(name=name, ok=False, detail=str(error))
    said = (facts.version, facts.build, facts.commit)
    commit_agrees = bool(facts.commit) is bool(engine.commit) and engine.commit.startswith(facts.commit)
    is_complete = bool(facts.flags) and bool(facts.kv_types)
    unread = set(snapshot.engine_files.backends) - {each.name for each in facts.attention if each.sms is not None}
    pairs = cell_pairs(snapshot.cell)
    is_complete = is_complete and not unread and tuple("-".join(pair) for pair in facts.kv_pairs) == pairs
    built = engine.cpu_variants.get(snapshot.platform)
    variants = [each.name for each in facts.cpu_variants]
    is_complete = is_complete and sorted(variants) == sorted(built.built if built else ())
    ok = commit_agrees and said[:2] == (engine.version, engine.build or 0) and is_complete
    counts = f"{len(facts.flags)} flags, {len(facts.kv_types)} KV types, {len(facts.kv_pairs)} pairs"
    unasked = f", without chips: {', '.join(sorted(unread))}" if unread else ""
    return Check(name=name, ok=ok, detail=f"{said}, {counts}, CPU variants: {', '.join(variants) or 'none'}{unasked}")


def cell_pairs(cell: Cell) -> tuple[str, ...]:
    """Returns the pairs of KV types that the GPU code was compiled for; none without compiled GPU code."""
    return cell.engine.fast_kv_pairs if cell.toolkit else ()


def check_image_facts(snapshot: ImageSnapshot) -> Check:
    name, cell = "image facts", snapshot.cell
    try:
        facts = parse_image_facts(_text(snapshot.tree, IMAGE_FACTS_PATH))
    except ValueError as error:
        return Check(name=name, ok=False, detail=str(error))
    label = snapshot.labels.get(BUILD_ID_LABEL)
    wrong = _difference("build id is not the label's", {facts.build_id} - {label or ""})
    wrong += _difference("recipe is not the label's", {facts.recipe or ""} - {snapshot.labels.get(RECIPE_LABEL, "")})
    wrong += _floors(snapshot, facts)
    wrong += _difference("its machine code is not of this form", set(cell.forms) ^ set(facts.sm))
    wrong += _difference("cell", {facts.cell} - {cell.id}) + _difference(
        "commit", {facts.engine_commit} - {cell.engine.commit}
    )
    return Check(name=name, ok=not wrong, detail="; ".join(wrong) or f"build id {facts.build_id}")


def _floors(snapshot: ImageSnapshot, facts: ImageFacts) -> list[str]:
    """Returns labels that differ from the facts by which the appliance refuses a machine."""
    said = {
        "io.appliance.cuda": facts.cuda,
        "io.appliance.sm": ", ".join(snapshot.cell.sms) or None,
        "io.appliance.driver.floor.sass": facts.driver_floor_sass,
        "io.appliance.driver.floor.ptx": facts.driver_floor_ptx,
    }
    differing = [name for name, value in said.items() if snapshot.labels.get(name) != (value or render.NONE)]
    return [f"{name}: {said[name]}, the label says {snapshot.labels.get(name)}" for name in differing]


def check_tree(snapshot: ImageSnapshot) -> Check:
    """Checks that this tree builds the image: an image of another commit proves nothing about it."""
    label = snapshot.labels.get(BUILD_ID_LABEL)
    is_same = label == snapshot.build_id
    detail = f"build id {label}" + ("" if is_same else f", this tree gives {snapshot.build_id}")
    return Check(name="built of this tree", ok=is_same, detail=detail)


def check_revision(snapshot: ImageSnapshot) -> Check:
    """Checks that the labelled commit has the image's inputs. It cannot be known for an image of another tree."""
    told, judged = snapshot.labels.get(REVISION_LABEL), snapshot.revision
    if judged is None:
        return Check(
            name="revision", ok=True, detail=f"{told}, not checked: the image is of another tree than this one"
        )
    return Check(name="revision", ok=not judged.is_false, detail=judged.words)


def check_files(snapshot: ImageSnapshot) -> Check:
    """Checks each file against the build's manifest, and the manifest against the image's label."""
    found = integrity.changed(snapshot.tree, snapshot.labels.get(build.FILES_LABEL))
    return _none_of("files as the build left them", found)


def check_links(snapshot: ImageSnapshot) -> Check:
    """Checks that the engine's links lead to their own names. No manifest has links."""
    return _none_of("no link of the engine leads astray", integrity.astray(snapshot.tree))


def check_recipe(snapshot: ImageSnapshot) -> Check:
    """Checks for foreign recipes and weights. No manifest lists them, since a model image adds its own."""
    found = model.foreign(snapshot.tree, snapshot.labels, snapshot.recipe)
    return _none_of("no foreign recipe, no foreign weights", found)


def check_preload(snapshot: ImageSnapshot) -> Check:
    return _none_of("nothing preloaded", integrity.preloaded(snapshot.tree, snapshot.config.get("Env") or ()))


def check_accounts(snapshot: ImageSnapshot) -> Check:
    return _none_of("root is alone with UID 0", integrity.roots(snapshot.tree))


def check_writable(snapshot: ImageSnapshot) -> Check:
    return _none_of("no code that its user may replace", integrity.writable(snapshot.tree))


def check_volume(snapshot: ImageSnapshot) -> Check:
    """Checks that group 0 may write: a new volume takes these rights, and any UID of group 0 can use it."""
    data = snapshot.tree.files.get("data")
    seen = (data.uid, data.gid, oct(data.mode)) if data else None
    is_declared = "/data" in (snapshot.config.get("Volumes") or {})
    ok = seen == (0, 0, "0o775") and is_declared
    return Check(name="/data", ok=ok, detail=f"{seen}, {'a volume' if is_declared else 'not a volume'}")


def check_user(snapshot: ImageSnapshot) -> Check:
    """Checks the user against the Dockerfile's own word: Docker takes `+0` and `00` for root, and any group."""
    user, wanted = str(snapshot.config.get("User") or "root"), snapshot.configured.get("User")
    detail = user if user == wanted else f"{user!r}, expected {wanted!r}"
    return Check(name="user is not root", ok=user == wanted and wanted not in ("0", "root"), detail=detail)


def check_run_line(snapshot: ImageSnapshot) -> Check:
    """Checks what `docker run` relies on: entry point, health check and times, ports, volumes, stop signal."""
    wrong = configured.differing(snapshot.config, snapshot.configured)
    return Check(name="run line", ok=not wrong, detail="; ".join(wrong) or "as the Dockerfile says")


def check_byte_code(snapshot: ImageSnapshot) -> Check:
    """Checks byte code: without it a read-only container compiles at each start; with times no rebuild is equal."""
    files = snapshot.tree.files
    sources = [path for path in files if path.startswith(snapshot.engine_files.code) and path.endswith(".py")]
    python = compat.python_of(snapshot.cell.base)
    missing = [path for path in sources if _byte_code(path, python) not in files]
    code = [entry for entry in files.values() if entry.path.endswith(".pyc")]
    checked = [entry.path for entry in code if entry.content[4:8] != UNCHECKED_HASH]
    wrong = _difference("without byte code", missing) + _difference("checked or timed", checked)
    ok = bool(sources) and not wrong
    return Check(name="byte code", ok=ok, detail="; ".join(wrong) or f"{len(code)} files, {len(sources)} of ours")


def check_debian(snapshot: ImageSnapshot) -> Check:
    """Compares the packages of the runtime stage with the Debian lock, or with the temporary lock of the build."""
    name = "Debian packages as locked"
    if _is_unlocked(snapshot.labels) and snapshot.debian is None:
        path = packages.path_for(snapshot.labels.get(BUILD_ID_LABEL, ""))
        return Check(name=name, ok=False, detail=f"the temporary lock that it was built of is not here: {path}")
    image, base = (_packages(files.get(STATUS)) for files in (snapshot.tree.files, snapshot.tree.base))
    digest = snapshot.labels.get("org.opencontainers.image.base.digest", "")
    wrong = debian.faults(snapshot.cell, snapshot.debian, snapshot.asked, image=image, base=base, identity=digest)
    detail = f"{'; '.join(wrong[:5])}{_more(wrong)}" if wrong else f"{len(image)} installed, none moved"
    if snapshot.debian and _is_unlocked(snapshot.labels):
        detail = f"of a temporary lock, {snapshot.debian.archive_date}, since the project's was not met: {detail}"
    return Check(name=name, ok=bool(image) and not wrong, detail=detail)


def _is_unlocked(labels: Mapping[str, str]) -> bool:
    return labels.get(REPRODUCIBLE_LABEL) == "no"


def check_size(snapshot: ImageSnapshot) -> Check:
    """Checks the size budget of the cell. Weights in a model image do not count."""
    weights = sum(each.size_bytes for path, each in snapshot.tree.files.items() if path.startswith(integrity.WEIGHTS))
    size_mib = (snapshot.tree.size_bytes - weights) / 2**20
    budget_mib = snapshot.cell.size_budget_mib
    return Check(name="size", ok=size_mib <= budget_mib, detail=f"{size_mib:.0f} MiB of {budget_mib} MiB")


CHECKS: tuple[Callable[[ImageSnapshot], Check], ...] = (
    check_start,
    check_engine_version,
    check_cpu_variants,
    check_cpu_kernels,
    check_kernels,
    check_jit,
    check_platform,
    check_libraries,
    check_no_driver,
    check_tools,
    check_licenses,
    check_web,
    check_gpu_environment,
    check_environment,
    check_no_leftovers,
    check_setuid,
    check_no_secret_files,
    check_no_secret_config,
    check_labels,
    check_engine_facts,
    check_image_facts,
    check_tree,
    check_revision,
    check_files,
    check_links,
    check_recipe,
    check_preload,
    check_accounts,
    check_writable,
    check_volume,
    check_user,
    check_run_line,
    check_byte_code,
    check_debian,
    check_size,
)


def _on(own: re.Pattern[str] | None, path: str) -> bool:
    return own is not None and own.search(path) is not None


def _colon(found: list[str], what: str = "") -> str:
    return f"{what}: {', '.join(found[:5])}{_more(found)}" if found else ""


def _packages(status: Entry | None) -> dict[str, str]:
    text = status.content.decode("utf-8", "replace") if status else ""
    return {package.name: package.version for package in debian.parse_status(text)}


def _is_tool(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return (folder in BINARY_FOLDERS and bool(TOOL.match(name))) or any(part in f"/{path}" for part in TOOL_PARTS)


def _is_of_base_home(snapshot: ImageSnapshot, entry: Entry) -> bool:
    return entry.path in KEPT_IN_HOME and entry.path in snapshot.tree.base


def _setuid(files: Mapping[str, Entry]) -> set[str]:
    return {entry.path for entry in files.values() if entry.kind == "file" and entry.mode & SETUID_BITS}


def _byte_code(path: str, python: str) -> str:
    """Returns the path of the byte code. `python` is 3.11; the file's name has it without the dot."""
    source = PurePosixPath(path)
    name = f"{source.stem}.cpython-{python.replace('.', '')}.pyc"
    return (source.parent / "__pycache__" / name).as_posix()


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
