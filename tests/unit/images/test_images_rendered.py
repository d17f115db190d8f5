"""The committed Dockerfiles, read as they are: what an image must have stands here by name.

`render --check` only says that they are what the templates make. A template that lost a line would be rendered anew and
pass: what is asked here is asked of the files alone.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "images/rendered").glob("*/Dockerfile"))
COMPILED_FOR_CUDA = [path for path in FILES if path.parent.name.startswith("llama-cu")]
MATRIX = yaml.safe_load((ROOT / "build_matrix.yaml").read_text(encoding="utf-8"))
LDD = """\tlinux-vdso.so.1 (0x00007ffd3c5f2000)
\tlibggml-base.so => /opt/llama/libggml-base.so (0x00007f1)
\tlibcudart.so.13 => /toolkit/opt/cuda/lib64/libcudart.so.13 (0x00007f2)
\tlibcublas.so.13 => /toolkit/opt/cuda/lib64/libcublas.so.13 (0x00007f3)
\tlibcublasLt.so.13 => /toolkit/opt/cuda/lib64/libcublasLt.so.13 (0x00007f4)
\tlibcuda.so.1 => /usr/lib/x86_64-linux-gnu/libcuda.so.1 (0x00007f5)
\tlibc.so.6 => /usr/lib/x86_64-linux-gnu/libc.so.6 (0x00007f6)
"""


def cell(path: Path) -> str:
    return path.parent.name


def instructions(path: Path) -> list[str]:
    """One a line, comments and continuations taken out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    return [line.strip() for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines() if line.strip()]


def stages(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    name = ""
    for line in instructions(path):
        if head := re.fullmatch(r"FROM (?:--platform=\S+ )?(\S+) AS (\S+)", line):
            name = head[2]
            found[name] = [f"FROM {head[1]}"]
        elif name:
            found[name].append(line)
    return found


def labels(path: Path) -> dict[str, str]:
    line = next(line for line in instructions(path) if line.startswith("LABEL "))
    return dict(re.findall(r'(\S+)="([^"]*)"', line))


@pytest.mark.parametrize("path", FILES, ids=cell)
def test_an_image_has_engine_appliance_licenses_and_nobody_is_root(path: Path) -> None:
    *_, runtime = stages(path).values()
    engine = cell(path).partition("-")[0]
    for folder in (f"/opt/{engine}", "/opt/appliance/lib", "/opt/appliance/lib/appliance", "/opt/appliance/licenses"):
        assert any(re.fullmatch(rf"COPY --from=\S+ {folder} {folder}", line) for line in runtime), folder
    assert any(re.fullmatch(r"COPY --from=\S+ \S+ /usr/local/bin/appliance", line) for line in runtime)
    assert any("image_facts.json" in line for line in runtime)
    for line in ("USER appliance", "VOLUME /data", "STOPSIGNAL SIGTERM", 'CMD ["serve"]',
                 'ENTRYPOINT ["/usr/bin/tini", "--", "appliance"]'):  # fmt: skip
        assert line in runtime
    assert any(line.startswith("HEALTHCHECK ") and '["appliance", "health"]' in line for line in runtime)


@pytest.mark.parametrize("path", FILES, ids=cell)
def test_what_is_copied_from_a_stage_comes_from_one_before_it(path: Path) -> None:
    before: set[str] = set()
    for name, lines in stages(path).items():
        for source in re.findall(r"--from=(\S+)|,from=(\S+?),", "\n".join(lines)):
            assert (source[0] or source[1]) in before
        before.add(name)


@pytest.mark.parametrize("path", FILES, ids=cell)
def test_nothing_is_installed_by_pip_without_its_hash(path: Path) -> None:
    commands = [
        each for line in instructions(path) for each in line.split("&&") if re.search(r"\bpip (install|download)", each)
    ]
    assert commands
    assert [each for each in commands if "--require-hashes" not in each] == []


@pytest.mark.parametrize("path", FILES, ids=cell)
def test_labels_say_what_the_matrix_has(path: Path) -> None:
    found, name = labels(path), cell(path)
    assert found["io.appliance.cell"] == name
    assert found["org.opencontainers.image.title"] == f"appliance:{name}"
    engine, _, target = name.partition("-")
    row = MATRIX["targets"][target]
    assert (found["io.appliance.engine"], found["io.appliance.cuda"]) == (engine, row.get("cuda", "none"))
    assert f"'{found['io.appliance.engine.version']}'" in str(MATRIX["engines"][engine])  # of one of its sources
    base = found["org.opencontainers.image.base.name"], found["org.opencontainers.image.base.digest"]
    assert "FROM {}@{}".format(*base) in next(reversed(stages(path).values()))
    if not row:
        assert found["io.appliance.cuda.toolkit"] == "none"
        return
    assert (MATRIX["toolkits"][row["cuda"]]["release"] in found["io.appliance.cuda.toolkit"]) == (engine == "llama")
    sms = row.get("sm", found["io.appliance.sm"].split(", "))
    assert found["io.appliance.sm"] == ", ".join([sms] if isinstance(sms, str) else sms)


@pytest.mark.parametrize("path", COMPILED_FOR_CUDA, ids=cell)
def test_the_libraries_of_cuda_come_along_and_the_drivers_does_not(path: Path) -> None:
    """The test runs the Dockerfile's own `sed` expression on an output of `ldd`."""
    of_stage = stages(path)
    (libraries,) = (line for line in of_stage["cuda-libraries"] if line.startswith("RUN "))
    (words,) = re.findall(r"sed -nE '([^']*)'", libraries)
    picked = subprocess.run(["sed", "-nE", words], input=LDD, capture_output=True, text=True, check=True).stdout
    assert picked.splitlines() == [
        f"/toolkit/opt/cuda/lib64/{name}.so.13 /opt/llama/{name}.so.13"
        for name in ("libcudart", "libcublas", "libcublasLt")
    ]
    assert "xargs -n 2 cp -L" in libraries
    runtime = next(reversed(of_stage.values()))
    assert any(re.fullmatch(r"COPY --from=cuda-libraries /opt/llama /opt/llama", line) for line in runtime)
    engine = "\n".join(of_stage["engine"])
    for file in ("libggml-cuda.so", "test-backend-ops", "kernel-check"):
        assert f"/opt/llama/{file} /opt/llama/" in engine
    assert "COPY --from=cuda-libraries /opt/appliance/licenses/cuda /opt/appliance/licenses/cuda" in engine
