"""EngineFacts of llama.cpp, from the output of its binary. They are read once, while an image is built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from appliance.errors import EngineArgumentsError, EngineLibraryError
from appliance.image_facts import CpuVariant, EngineFacts, ImageFacts
from appliance.run import run

BINARY = "llama-server"
CUDA_BACKEND = "libggml-cuda.so"
TIMEOUT_S = 30.0
_VARIANTS = Path(__file__).with_name("cpu_variants.yaml")
_CPU_BACKEND = re.compile(r"libggml-cpu-(.+)\.so")


def query_facts(binary: Path, environment: Mapping[str, str] | None = None) -> EngineFacts:
    """Return the facts that the binary tells. `environment` is its whole environment.

    Raises EngineLibraryError if the binary does not run, EngineArgumentsError if its output has an unknown form.
    """
    backends = tuple(sorted(path.name for path in binary.parent.glob("libggml-*.so") if path.name != "libggml-base.so"))
    around = environment or {}
    said, usage = _said(binary, "--version", around), _said(binary, "--help", around)
    return parse_facts(version=said, usage=usage, backends=backends)


def read_facts(binary: Path, kv_pairs: str) -> EngineFacts:
    """Return the facts for an image that is being built. `kv_pairs` as `parse_kv_pairs` takes them."""
    facts = query_facts(binary)
    return replace(facts, kv_pairs=parse_kv_pairs(kv_pairs, facts.kv_types))


def _said(binary: Path, flag: str, environment: Mapping[str, str]) -> str:
    # The appliance's LD_LIBRARY_PATH is not passed on, as when the engine serves: the loader would search it before the
    # binary's own folder.
    done = run((str(binary), flag), timeout_s=TIMEOUT_S, environment=environment)
    if done.returncode != 0:
        message = f"engine does not answer {flag}: {binary}: exit code {done.returncode}: {done.stderr.strip()[-500:]}"
        raise EngineLibraryError(message, hint="run ldd on it: a library is missing, or the CPU is too old")
    return done.stdout + done.stderr


def parse_facts(*, version: str, usage: str, backends: tuple[str, ...] = ()) -> EngineFacts:
    """Return the facts from the output of --version and --help, and the names of the backend files.

    `version` looks like `version: 0.5.0-dev (build 11312, commit 0c1e57098)`.
    """
    said = re.search(r"version: (\S+) \(build (\d+), commit (\S+)\)", version)
    if not said:
        message = f"engine names no version: {version.strip()[:200]!r}"
        raise EngineArgumentsError(message, hint="expected `version: X (build N, commit C)`")
    return EngineFacts(
        version=said[1],
        build=int(said[2]),
        commit=said[3],
        flags=parse_flags(usage),
        kv_types=parse_kv_types(usage),
        backends=backends,
        split_modes=parse_split_modes(usage),
        cpu_variants=parse_variants(backends, _VARIANTS.read_text(encoding="utf-8")) if backends else (),
    )


def parse_variants(backends: Iterable[str], table: str) -> tuple[CpuVariant, ...]:
    """Return the CPU variants whose files (`libggml-cpu-haswell.so`) are among `backends`, the fastest last.

    `table` is the text of cpu_variants.yaml. Raises EngineArgumentsError for a file that the table does not list,
    because such a variant could never be chosen.
    """
    there = {found[1] for name in backends if (found := _CPU_BACKEND.fullmatch(name))}
    known = _variants_in(table)
    if unknown := sorted(there - known.keys()):
        message = f"CPU variants of the engine have no entry in {_VARIANTS.name}: {', '.join(unknown)}"
        raise EngineArgumentsError(message, hint="add their instructions, from the engine's CMakeLists.txt")
    return tuple(CpuVariant(name=name, isa=isa) for name, isa in known.items() if name in there)


@cache
def _variants_in(table: str, platform: str | None = None) -> Mapping[str, tuple[str, ...]]:
    """Return the instructions of each variant, of one platform or of all."""
    import yaml  # here: an image's build needs it, and it costs every start 20 ms

    return {
        name: tuple(flag for feature in features for flag in rows["features"][feature])
        for name_of_platform, rows in yaml.safe_load(table).items()
        if platform in (None, name_of_platform)
        for name, features in rows["variants"].items()
    }


def facts_in_cell(
    facts: EngineFacts, image: ImageFacts, *, kv_pairs: tuple[tuple[str, str], ...], is_arm: bool
) -> EngineFacts:
    """Return what the engine of a cell says, from the facts of another cell of the same release.

    Flags and types are compiled into the program, which all cells share. A cell adds loadable backends: one for each
    CPU variant, and one for CUDA.
    """
    table = _VARIANTS.read_text(encoding="utf-8")
    names = _variants_in(table, "arm64" if is_arm else "amd64")
    variants = [f"libggml-cpu-{name}.so" for name in image.cpu_variants if name in names]
    backends = tuple(sorted((*variants, *((CUDA_BACKEND,) if image.cuda else ()))))
    return replace(facts, backends=backends, cpu_variants=parse_variants(backends, table), kv_pairs=kv_pairs)


def parse_flags(usage: str) -> tuple[str, ...]:
    """Return every flag in --help, in all spellings: `-fit,  --fit [on|off]   whether to …` gives -fit and --fit."""
    flags: set[str] = set()
    for line in usage.splitlines():
        if not line.startswith("-") or line.startswith("-----"):
            continue
        head = re.split(r"\s{2,}(?![\s-])", line, maxsplit=1)[0]
        flags.update(re.findall(r"(?:^|[\s,])(--?[A-Za-z][A-Za-z0-9.-]*)", head))
    if not flags:
        message = "engine's --help lists no flags"
        raise EngineArgumentsError(message, hint="its format has changed; see appliance/engines/llama/process/facts.py")
    return tuple(sorted(flags))


def parse_kv_types(usage: str) -> tuple[str, ...]:
    found = re.search(r"--cache-type-k.*?allowed values:\s*(.*?)\n\s*\(default", usage, re.S)
    if not found:
        message = "engine's --help lists no KV cache types"
        raise EngineArgumentsError(message, hint="its format has changed; see appliance/engines/llama/process/facts.py")
    return tuple(word.strip() for word in found[1].replace("\n", " ").split(",") if word.strip())


def parse_kv_pairs(text: str, kv_types: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of KV cache types in a text like `q8_0-q8_0;q8_0-q4_0`, K first.

    Raises EngineArgumentsError for a type that the engine does not offer.
    """
    pairs: list[tuple[str, str]] = []
    for word in filter(None, text.split(";")):
        k, _, v = word.partition("-")
        if k not in kv_types or v not in kv_types:
            message = f"engine has no such pair of KV types: {word}, given by --kv-pairs"
            raise EngineArgumentsError(message, hint=f"its --help lists {', '.join(kv_types)}")
        pairs.append((k, v))
    return tuple(pairs)


def parse_split_modes(usage: str) -> tuple[str, ...]:
    """Return the values of `--split-mode {none,layer,row,tensor}` in --help; empty if the engine lacks the flag."""
    found = re.search(r"--split-mode \{([a-z,]+)\}", usage)
    return tuple(found[1].split(",")) if found else ()
