"""Who may import whom (DESIGN.md section 3), read from the syntax trees."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for package in ("appliance", "images")
    for path in (ROOT / package).rglob("*.py")
    if "rendered" not in path.parts
)
# A room may import itself, the leaves, and what stands here: only steps before it in the order in which data passes.
LEAVES = {
    "console",
    "system",
    "address",
    "errors",
    "keep_alive",
    "command",
    "documents",
    "engine_route",
    "image_facts",
    "model_names",
    "moe",
    "race",
    "reference",
    "values",
}
MAY_IMPORT = {
    "console": {"errors", "values"},
    "system": {"errors"},
    "address": set(),
    "errors": set(),
    "keep_alive": set(),
    "command": set(),
    "documents": set(),
    "engine_route": set(),
    "image_facts": {"documents", "values"},
    "model_names": set(),
    "race": set(),
    "reference": set(),
    "values": set(),
    "moe": set(),
    "settings": set(),
    "run": set(),
    "volume": {"model"},
    "probe": {"run"},
    "model": set(),
    "plan": {"settings"},
    "engines": {"probe", "model", "settings", "plan", "run"},
    "tune": {"probe", "settings", "plan", "engines", "supervisor"},
    "profile": {"probe", "model", "settings", "plan", "engines", "tune"},
    "abilities": {"model", "engines", "profile"},
    "supervisor": set(),
    "fleet": set(),
    "gateway": set(),
    "weights": {"volume", "model", "settings"},
    "quantize": {"volume", "weights", "model", "engines", "tune", "supervisor"},
    "start": {"abilities", "weights", "probe", "model", "settings", "plan", "engines", "profile"},
    "selection": {"weights", "probe", "model", "settings", "plan", "engines", "profile", "start"},
    "preview": {
        "abilities", "weights", "probe", "model", "settings", "plan", "engines", "profile", "start", "selection",
    },
    "serve": {
        "start",
        "selection",
        "volume",
        "weights",
        "probe",
        "model",
        "settings",
        "plan",
        "engines",
        "tune",
        "profile",
        "quantize",
        "supervisor",
        "gateway",
        "fleet",
        "doctor",
        "abilities",
    },
    "doctor": {
        "volume",
        "weights",
        "probe",
        "model",
        "settings",
        "plan",
        "engines",
        "profile",
        "start",
        "selection",
        "preview",
        "gateway",
    },
    "host": {"run", "settings", "abilities"},
}  # fmt: skip
# Floors of serve/: each imports itself and what stands here. `run.py` is above all of them.
FLOORS = {
    "model": set(),
    "engine": {"model"},
    "background": {"model", "engine"},
    "receipts": {"model"},
    "gateway": {"model", "receipts"},
    "open": {"model", "gateway"},
    "hosts": {"model", "engine", "gateway"},
    "life": {"model", "engine", "background", "gateway", "open"},
    "fleet": {"model", "engine", "gateway", "life", "open"},
}
WITHOUT_RULES = {"__init__", "__main__"}  # of which the latter may import every room

STRICT_LEAVES = {
    "supervisor": {"errors", "command", "race", "system", "values"},
    "console": {"errors", "values"},
    "system": {"errors"},
    "address": set(),
    "errors": set(),
    "keep_alive": set(),
    "command": {"values"},
    "documents": set(),
    "engine_route": set(),
    "image_facts": {"documents", "values"},
    "model_names": {"values"},
    "race": set(),
    "reference": {"errors", "values"},
    "values": set(),
    "moe": set(),
}
WITHOUT_IO = (
    "appliance/plan/",
    "appliance/moe/",
    "appliance/fleet/admit",
    "appliance/fleet/successors",
    "appliance/fleet/use",
    "appliance/engines/llama/planning/",
    "appliance/engines/llama/process/server",
    "appliance/engines/llama/process/perplexity",
    "appliance/engines/llama/process/endings",
    "appliance/engines/gpus",
    "appliance/engines/endings",
    "appliance/engines/vllm/process/endings",
    "appliance/engines/vllm/process/log",
    "appliance/tune/search/candidates",
    "appliance/tune/figures/measurement",
    "appliance/tune/figures/acceptance",
    "appliance/tune/figures/slots",
    "appliance/tune/figures/perplexity",
    "appliance/tune/figures/curve",
    "appliance/tune/figures/workload",
    "appliance/tune/figures/modes",
    "appliance/tune/search/refit",
    "appliance/tune/search/cost_terms",
    "appliance/tune/figures/speeds",
    "appliance/tune/search/search",
    "appliance/serve/hosts/group",
    "appliance/serve/hosts/member",
    "appliance/start/checks",
    "appliance/serve/background/idle_policy",
    "appliance/serve/gateway/documents",
    "appliance/serve/receipts/",
    "appliance/profile/pick",
    "appliance/profile/drift",
    "appliance/profile/from_tuning",
    "appliance/profile/at_start",
    "appliance/probe/load/conditions",
    "appliance/selection/rank",
    "appliance/selection/table",
    "appliance/selection/forecast",
    "appliance/engines/vllm/planning/",
    "appliance/engines/vllm/process/server",
    "appliance/gateway/routes/models",
    "appliance/model/shapes/described",
    "appliance/model/shapes/quantize",
    "appliance/model/shapes/tensors",
    "appliance/model/shapes/shape",
    "images/matrix/matrix",
    "images/matrix/compat",
    "images/choice/explain",
    "images/choice/select",
    "images/matrix/render",
)
# The groups of images/ in the order in which an image comes about: each may import those before it.
IMAGES_LEAVES = ("errors", "own_python", "rows", "docker", "console")
IMAGES_ORDER = ("matrix", "choice", "recipes", "pins", "layers", "build", "proof", "ci", "host", "verbs")
# Programs that run inside an image or its build, beside the files that copy them there.
COPIED = {"builder", "router"}
OWN_DATA = {"appliance/engines/llama/planning/experts/replays.py", "appliance/engines/vllm/planning/model/chips.py"}
ONLY_IN = {
    "subprocess": ("images/docker.py", "appliance/supervisor/", "appliance/run.py"),
    "fastapi": ("appliance/gateway/",),
    "uvicorn": ("appliance/gateway/",),
    "docker": ("images/docker.py", "appliance/host/"),
    "msgspec": ("appliance/documents.py",),
    "psutil": ("appliance/probe/load/processes.py", "appliance/host/court/watch.py"),
    "huggingface_hub": ("appliance/weights/download/listing.py",),
    "httpx2": ("appliance/weights/download/listing.py",),
    "certifi": ("appliance/weights/download/ranges.py",),
}


KINDS = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def imports(path: Path) -> tuple[tuple[str, ast.stmt], ...]:
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module stands"
            yield node.module or "", node


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file whose kind some rule needs."""
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, KINDS))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def test_imports_point_up_the_stream() -> None:
    for path in FILES:
        name = name_of(path)
        parts = path.relative_to(ROOT).with_suffix("").parts
        room = parts[1]
        for module, node in imports(path):
            package = module.split(".")[0]
            for limited, allowed in ONLY_IN.items():
                if package == limited:
                    assert name.startswith(allowed), f"{name}:{node.lineno} imports {module}"
            if parts[0] == "images" and package == "appliance":
                assert module == "appliance.image_facts", f"{name}:{node.lineno} imports {module}"
            if parts[0] == "appliance":
                assert package != "images", f"{name}:{node.lineno} imports {module}"
                other = room_of(module) if package == "appliance" else ""
                if other and room not in WITHOUT_RULES and other != room:
                    allowed_rooms = STRICT_LEAVES.get(room, LEAVES | MAY_IMPORT[room])
                    assert other in allowed_rooms, f"{name}:{node.lineno} imports {module}"


def test_environment_and_io_stay_in_their_rooms() -> None:
    for path in FILES:
        name = name_of(path)
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in {"environ", "getenv", "putenv"} or name == "appliance/settings.py", (
                    f"{name}:{node.lineno}"
                )
                assert node.attr not in {"system", "popen"}, f"{name}:{node.lineno}"
            if name.startswith(WITHOUT_IO) and isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                is_own_data = (name.startswith("images/") or name in OWN_DATA) and called in {
                    "read_text",
                    "read_bytes",
                    "open",
                }
                assert is_own_data or called not in {
                    "open",
                    "read_text",
                    "write_text",
                    "read_bytes",
                    "write_bytes",
                    "print",
                }, f"{name}:{node.lineno} calls {called}"


def test_weights_are_read_as_models_in_one_place() -> None:
    """Elsewhere, what is fetched and kept is only bytes with names."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        if name_of(path).startswith("appliance/weights/") and path.name != "stores.py"
        for module, node in imports(path)
        if module.startswith("appliance.model")
    ]
    assert found == []


def test_every_room_has_its_rule() -> None:
    package = ROOT / "appliance"
    rooms = {path.relative_to(package).with_suffix("").parts[0] for path in package.rglob("*.py")}
    assert rooms == MAY_IMPORT.keys() | WITHOUT_RULES


ENGINES = sorted(path.parent.name for path in (ROOT / "appliance/engines").glob("*/__init__.py"))
# Programs, libraries and device names of each engine.
WORDS = {"llama": r"(?<!o)llama|ggml|CUDA[0-9]|perplexity\.cpp", "vllm": r"vllm"}
# Proper names that have such a word in them, each in the one file that needs it.
PROPER_NAMES = {
    "appliance/engines/vllm/planning/model/chips.yaml": "ExLlama",  # a kernel
    "appliance/engines/vllm/api/parsers.yaml": "Llama 3|Llama 4|llama3|llama4|llama_tool",  # models and parsers
    # What boards and balancers look for, whatever engine serves.
    "appliance/engines/metric_aliases.py": "vllm:|llamacpp:|llama-server|vLLM",
    "appliance/engines/vllm/cells/vllm-cpu.json": "exllama|llama3_json|llama4_json|llama4_pythonic",
    "appliance/engines/vllm/cells/vllm-cu130.json": "exllama|llama3_json|llama4_json|llama4_pythonic",
    "appliance/engines/vllm/planning/model/rope.py": "llama3|deepseek_llama_scaling",  # kinds of a scaling
    "appliance/model/recipes.json": "ggml-org",  # who publishes a repository
    "appliance/model/formats/parts.py": "llama-gguf-split",  # the only program that merges parts
    # what serves the other format, and the program that converts to this one
    "appliance/model/__init__.py": "images whose name begins vllm-|convert_hf_to_gguf.py of llama.cpp",
}
# Types, keys and architectures of GGUF, and the names of published models.
OF_THE_FORMAT = (
    r"ggml_types|GgmlType|GGML_TYPES|tokenizer\.ggml\.|a GGML file from before GGUF|a ggml type for "
    r"|(?<![\w.-])llama(?:4|-embed|-3\.\d-\d+b)?(?![\w.-])"
)
KNOWS_THE_FORMAT = "appliance/model/"


def test_what_does_no_io_is_there() -> None:
    assert [prefix for prefix in WITHOUT_IO if not any(name_of(path).startswith(prefix) for path in FILES)] == []


def words_that_are_not_for(name: str) -> re.Pattern[str]:
    """Return a pattern of the words of all engines except the one that owns this module."""
    others = (words for engine, words in WORDS.items() if not name.startswith(f"appliance/engines/{engine}/"))
    return re.compile("|".join(others), re.IGNORECASE)


class WithoutProse(ast.NodeTransformer):
    """Docstrings and other texts that nobody reads at run time."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else node


def without_sources(document: object) -> object:
    if isinstance(document, dict):
        return {key: without_sources(value) for key, value in document.items() if key != "source"}
    return document


def text_of(path: Path) -> str:
    """Return the text of a file. For the package that knows the format, prose and the format's own names are left
    out."""
    text = path.read_text(encoding="utf-8")
    if name_of(path).startswith(KNOWS_THE_FORMAT):
        if path.suffix == ".py":
            text = ast.unparse(WithoutProse().visit(ast.parse(text)))
        elif path.suffix == ".yaml":
            text = yaml.safe_dump(without_sources(yaml.safe_load(text)))
        text = re.sub(OF_THE_FORMAT, "", text)
    return re.sub(PROPER_NAMES.get(name_of(path), "$^"), "", text)


def test_an_engine_is_reached_through_its_doors_only() -> None:
    """No module imports another engine's folder; what `engine.load` opens is the only way in."""
    for path in FILES:
        name = name_of(path)
        for module, node in imports(path):
            parts = module.split(".")
            if parts[:2] != ["appliance", "engines"] or len(parts) < 3 or parts[2] not in ENGINES:
                continue
            assert name.startswith(f"appliance/engines/{parts[2]}/"), f"{name}:{node.lineno} imports {module}"


def test_no_engine_is_named_outside_its_folder() -> None:
    """The folder of another engine does not name it either."""
    assert WORDS.keys() == set(ENGINES)
    files = [path for path in (ROOT / "appliance").rglob("*") if path.suffix in {".py", ".json", ".yaml"}]
    assert len(files) > 200
    found = [
        f"{name_of(path)}: {line.strip()}"
        for path in files
        for words in [words_that_are_not_for(name_of(path))]
        for line in text_of(path).splitlines()
        if words.search(line)
    ]
    assert found == []


def test_every_exception_is_needed() -> None:
    for name, words in PROPER_NAMES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert [word for word in words.split("|") if word not in text] == [], name


def test_what_comes_first_is_waited_for_in_one_place() -> None:
    """`race.first_of` cancels the rest and waits for its end, which is forgotten where it is written again."""
    found = [name_of(path) for path in FILES if "FIRST_COMPLETED" in path.read_text()]
    assert found == ["appliance/race.py"]


def test_no_rule_allows_what_nobody_imports() -> None:
    """A permission that nobody uses is one that somebody forgot to remove."""
    used: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if name_of(path).startswith("appliance/"):
            room = path.relative_to(ROOT / "appliance").with_suffix("").parts[0]
            used[room].update(room_of(module) for module, _ in imports(path) if module.startswith("appliance."))
    unused = {room: allowed - used[room] for room, allowed in MAY_IMPORT.items() if allowed - used[room]}
    assert unused == {}


def floor_of(module: str) -> str:
    """Return the folder of serve/ that a module lies in; empty for `run.py`, which is above all."""
    _, _, *below = module.split(".")
    return below[0] if len(below) > 1 else ""


def test_floors_of_serve_import_downwards_only() -> None:
    graph = {name: others for name, others in _graph().items() if name.startswith("appliance.serve.")}
    assert {floor_of(name) for name in graph} == FLOORS.keys() | {""}
    used: dict[str, set[str]] = {floor: set() for floor in FLOORS}
    for name, others in graph.items():
        if floor := floor_of(name):
            used[floor] |= {floor_of(other) for other in others if other in graph} - {floor}
    assert used == FLOORS


def test_only_the_command_line_imports_the_story_of_a_start() -> None:
    found = {name for name, others in _graph().items() if "appliance.serve.run" in others}
    assert found == {"appliance.__main__"}


def test_no_room_for_leftovers() -> None:
    assert not [name_of(path) for path in FILES if path.stem in {"utils", "helpers", "common", "misc"}]


def test_imports_inside_functions_say_why() -> None:
    for path in FILES:
        lines = path.read_text().splitlines()
        for function in nodes(path):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            end = function.end_lineno or 0
            inside = [node.lineno for _, node in imports(path) if function.lineno < node.lineno <= end]
            if inside and name_of(path) != "appliance/__main__.py":  # which says so once for all verbs
                nearby = "\n".join(lines[min(inside) - 3 : max(inside) + 1])
                assert "# " in nearby, f"{name_of(path)}:{min(inside)}"
                assert "start" in nearby or "cost" in nearby, f"{name_of(path)}:{min(inside)}"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _named(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the modules that an import may mean, or names within a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    else:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _graph() -> Mapping[str, frozenset[str]]:
    """Return the files that each file imports, including imports within functions and for types. A package's `__init__`
    is a node of its own."""
    modules = {_module(path): path for path in FILES}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in nodes(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for each in _named(node):
                    package = each.rpartition(".")[0]
                    graph[name] |= {m for m in (each, f"{each}.__init__", package) if m in modules and m != name}
                    if each not in modules and package not in modules and f"{package}.__init__" in modules:
                        graph[name].add(f"{package}.__init__")
    return {name: frozenset(others) for name, others in graph.items()}


def _circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError as error:
        return [set(error.args[1])]
    return []


def _folder(module: str) -> str:
    """Return the folder of a module. A package's `__init__` and a file beside packages (`appliance/errors.py`) stand
    for themselves."""
    folder, _, name = module.rpartition(".")
    return module if name in WITHOUT_RULES or "." not in folder else folder


def test_no_file_imports_itself_over_others() -> None:
    assert _circles(_graph()) == []


def test_no_folder_imports_itself_over_others() -> None:
    folders: dict[str, set[str]] = defaultdict(set)
    for name, others in _graph().items():
        folders[_folder(name)] |= {_folder(other) for other in others} - {_folder(name)}
    assert _circles(folders) == []


MOST_FILES = 15


def test_a_folder_can_be_read() -> None:
    counts = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {name_of(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_groups_of_images_import_those_before_them() -> None:
    order = (*IMAGES_LEAVES, *IMAGES_ORDER)
    groups = {path.parent.name for path in (ROOT / "images").glob("*/__init__.py")}
    assert groups == set(IMAGES_ORDER)
    for module, imported in _graph().items():
        group = room_of(module)
        if not module.startswith("images.") or group in {*COPIED, *WITHOUT_RULES}:
            continue
        others = {room_of(each) for each in imported if each.startswith("images.")}
        for other in others - {group, *COPIED, *WITHOUT_RULES}:  # what is copied into builds imports nothing of ours
            assert order.index(other) < order.index(group), f"{module} imports {other}"
