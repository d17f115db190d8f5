"""Checks in the machine code that AMX tiles are configured before `ldtilecfg` reads the configuration.

GCC 12's intrinsic hides 56 of its 64 bytes from the optimizer. Rows and columns are then dropped as dead stores, and
every CPU with AMX dies at the first tile instruction. No test on another CPU sees that; the object code shows it.

    objdump -d --no-show-raw-insn LIBRARY | python3 tile_config.py LIBRARY

Exit 1 names the place. Intel SDM, LDTILECFG: bytes 16 to 31 hold each tile's columns in bytes, 48 to 55 its rows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

COLUMNS, ROWS = range(16, 32), range(48, 56)
LOOK_BACK = 64  # instructions: a compiler fills 64 bytes in a dozen
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*?)\s*(?:#.*)?$")
PLACE = re.compile(r"^(-?(?:0x[0-9a-f]+)?)(\(%\w+\))$")
SUFFIX_BYTES = {"b": 1, "w": 2, "l": 4, "q": 8}
# x86-64 names: a 32-bit write clears the rest, so the full register's state is what counts.
VECTOR = re.compile(r"^%([xyz])mm(\d+)$")
READS = ("cmp", "test", "push")  # that write nothing to their last operand
VECTOR_BYTES = {"x": 16, "y": 32, "z": 64}


@dataclass(frozen=True)
class Instruction:
    address: str
    name: str
    operands: tuple[str, ...]


def parse(lines: Iterable[str]) -> Iterator[Instruction]:
    """Parses the output of `objdump -d --no-show-raw-insn`."""
    for line in lines:
        if match := INSTRUCTION.match(line):
            yield Instruction(match[1], match[2], tuple(_operands(match[3])))


def faults(instructions: Iterable[Instruction]) -> Iterator[str]:
    """A line for each `ldtilecfg` whose rows or columns nothing but zeros was stored to."""
    before: list[Instruction] = []
    for each in instructions:
        if each.name == "ldtilecfg":
            missing = _missing(before, each.operands[0])
            if missing:
                yield f"{each.address}: ldtilecfg {each.operands[0]}: {' and '.join(missing)} are not set before it"
        before = [*before[1 - LOOK_BACK :], each]


def _missing(before: list[Instruction], operand: str) -> list[str]:
    target = PLACE.match(operand)
    if target is None:
        return ["rows", "columns"]  # nothing is known of such a place, and a check that cannot see must not pass
    first, base = _offset(target), target[2]
    led, root, moved = _last_write(before, base), base, 0
    if led >= 0 and before[led].name == "lea":  # gcc 14: lea 0xc0(%rsp),%rdi before ldtilecfg (%rdi)
        source = PLACE.match(before[led].operands[0])
        if source and source[2] != base:
            root, moved = source[2], _offset(source)
    since = _last_write(before, root)
    if root != base and since > led:
        return ["rows", "columns"]  # what was stored through it is elsewhere
    is_zero: dict[str, bool] = {}
    is_set = dict.fromkeys(range(64), False)
    for at, each in enumerate(before):
        if not each.operands:
            continue
        *sources, last = each.operands
        stored = PLACE.match(last)
        if stored and sources and at > (led if stored[2] == base else since) and stored[2] in (base, root):
            offset = _offset(stored) + (moved if stored[2] == base else 0) - first - moved
            for byte in range(offset, offset + _width(each, sources[0])):
                if byte in is_set:
                    is_set[byte] = not _is_zero(sources[0], is_zero)
        elif last.startswith("%"):
            # xor of a register with itself, in any of its forms
            is_zero[_whole(last)] = "xor" in each.name and len(set(sources)) == 1 and _whole(sources[0]) == _whole(last)
    return [name for name, place in (("rows", ROWS), ("columns", COLUMNS)) if not any(is_set[byte] for byte in place)]


def _offset(place: re.Match[str]) -> int:
    return int(place[1] or "0", 16)


def _last_write(before: list[Instruction], place: str) -> int:
    """Returns the index of the last write to the register in `(%rdi)`, -1 if there is none."""
    register = _whole(place.strip("()"))
    return max(
        (
            at
            for at, each in enumerate(before)
            if each.operands and not each.name.startswith(READS) and _whole(each.operands[-1]) == register
        ),
        default=-1,
    )


def _is_zero(source: str, is_zero: dict[str, bool]) -> bool:
    return source == "$0x0" or is_zero.get(_whole(source), False)


def _width(each: Instruction, source: str) -> int:
    if match := VECTOR.match(source):
        return VECTOR_BYTES[match[1]]
    if source.startswith("$"):
        return SUFFIX_BYTES.get(each.name[-1], 4)
    name = source.removeprefix("%")
    if re.fullmatch(r"r(?:[a-d]x|[sd]i|[bs]p|\d+)", name):
        return 8
    return 4 if re.fullmatch(r"e\w+|r\d+d", name) else 2 if re.fullmatch(r"[a-d]x|[sd]i|r\d+w", name) else 1


def _whole(register: str) -> str:
    """%xmm3, %ymm3 and %zmm3 are one; so are %edx and %rdx."""
    if match := VECTOR.match(register):
        return f"vector {match[2]}"
    name = register.removeprefix("%")
    if match := re.fullmatch(r"r(\d+)[dwb]?", name):
        return f"general {match[1]}"
    return f"general {name.lstrip('er')}"


def _operands(text: str) -> Iterator[str]:
    """Splits at the commas outside of parentheses."""
    for part in re.split(r",(?![^(]*\))", text):
        if part.strip():
            yield part.strip()


def main(name: str) -> int:
    instructions = list(parse(sys.stdin))
    if not instructions:
        sys.stderr.write(f"error: no machine code was read of {name}\n")
        return 1
    found = list(faults(instructions))
    for line in found:
        sys.stderr.write(f"error: {name}: {line}: every CPU with AMX would die here\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "standard input"))
