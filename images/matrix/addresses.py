"""Width of a process's addresses on this machine: nvcc gets fixed ones, which not every kernel has.

images/builder/fixed-addresses.c tells why, and begins at 2^44 and 2^45. Kernels of arm64 may be built for 39 or 42
bits.
"""

from __future__ import annotations

import re
from pathlib import Path

from images.errors import BuildError
from images.matrix.matrix import Cell

MAPS = Path("/proc/self/maps")
NEEDED_BITS = 47  # the upper half of them is where Linux puts programs, libraries and stacks
RANGE = re.compile(r"^[0-9a-f]+-([0-9a-f]+) .*$", re.MULTILINE)
OF_THE_KERNEL = "[vsyscall]"  # stands beyond what a process can use


def bits(maps: str) -> int | None:
    """Returns the width in bits of a process's addresses, by that of its stack. None if it cannot be told."""
    ends = [int(found[1], 16) for found in RANGE.finditer(maps) if OF_THE_KERNEL not in found[0]]
    return (max(ends) - 1).bit_length() if ends else None


def refuse_narrow(cell: Cell, maps: str) -> None:
    """Raises BuildError for a cell whose compiler would not get its addresses, before it has run for half an hour."""
    found = bits(maps)
    if cell.target.cuda is None or not cell.engine.is_compiled or found is None or found >= NEEDED_BITS:
        return
    message = f"cell {cell.id} cannot be built here: nvcc needs {NEEDED_BITS}-bit addresses, this kernel has {found}"
    raise BuildError(message, hint="build it on a kernel with CONFIG_ARM64_VA_BITS_48, as Ubuntu's and Debian's are")


def here() -> str:
    """Returns this process's memory map; empty without that file, if containers run on another machine."""
    return MAPS.read_text("ascii", errors="replace") if MAPS.is_file() else ""
