"""Collects what engines warn of and go on from, out of their sources, into harmless.lines.

    harmless.py --llama FOLDER --vllm FOLDER

`--llama` is the pinned vendor/llama.cpp, `--vllm` an unpacked wheel. Kept are the lines that say a word of memory: a
rule that took one of them for a cause would call memory what is none. Placeholders get values.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).with_name("harmless.lines")
HEAD = "# Made by harmless.py: warnings of llama_cpp_python 0.3.36 and vLLM 0.33.0 that say a word of memory."
OF_MEMORY = re.compile(r"(?i)memor|alloc|\bOOM\b|\bshm\b|space|pinned|mlock|buffer|\bcache\b|capacity")
_CALL = re.compile(
    r"\b(?:(?:LLAMA|GGML)_LOG_(?:WARN|DEBUG)|LOG_WRN|LOG_DBG|SRV_WRN|SRV_DBG|SLT_WRN|SLT_DBG|SPC_WRN|COM_WRN)\s*\("
    r"\s*((?:\"(?:[^\"\\]|\\.)*\"|\s|GGML_CUDA_NAME|PRI\w+)+)"
)
_VALUE = re.compile(r"%[-+ 0#]*[\d*]*(?:\.[\d*]+)?(?:hh|h|ll|l|z|j|t)?([diouxXeEfFgGcspr%])")
_VALUES = {"s": "alpha", "r": "'alpha'", "c": "a", "p": "0x7f00", "%": "%"}


def filled(words: str) -> str:
    found = _VALUE.sub(lambda hit: _VALUES.get(hit[1], "1900.50" if hit[1] in "eEfFgG" else "1900"), words)
    return " ".join(found.split())


def of_llama(root: Path) -> Iterator[str]:
    for folder in ("src", "common", "tools/server", "tools/mtmd", "ggml/src"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".c", ".cpp", ".cu", ".cuh", ".h"} and not re.search(
                "ggml-(?:sycl|vulkan|metal|opencl|cann|hexagon|webgpu|openvino|virtgpu|zdnn|zendnn)|spacemit", str(path)
            ):
                for call in _CALL.finditer(path.read_text(encoding="utf-8", errors="replace")):
                    literal = re.sub(r"\"\s*(?:PRI\w+)\s*\"", "d", call[1]).replace("GGML_CUDA_NAME", '"CUDA"')
                    yield filled("".join(ast.literal_eval(part) for part in re.findall(r'"(?:[^"\\]|\\.)*"', literal)))


def of_vllm(root: Path) -> Iterator[str]:
    for path in sorted((root / "vllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            said = node.args[0]
            if node.func.attr.startswith("warning") and isinstance(said, ast.Constant) and isinstance(said.value, str):
                yield filled(said.value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, required=True)
    args = parser.parse_args()
    lines = [
        f"{engine}: {line}"
        for engine, found in (("llama", of_llama(args.llama)), ("vllm", of_vllm(args.vllm)))
        for line in sorted({line for line in found if OF_MEMORY.search(line)})
    ]
    OUT.write_text("\n".join((HEAD, *lines)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
