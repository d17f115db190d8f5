"""How wide addresses are, from what Linux says of a process; and the cells that need wide ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from images.errors import BuildError
from images.matrix import addresses, matrix

X86 = """\
55d0c0a00000-55d0c0a02000 r--p 00000000 08:01 1 /usr/bin/cat
7ffd1b5e2000-7ffd1b603000 rw-p 00000000 00:00 0 [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
"""
ARM_48 = "aaaad5a10000-aaaad5a1a000 r-xp 00000000 08:01 1 cat\nffffc3a1b000-ffffc3a3c000 rw-p 0 00:00 0 [stack]\n"
ARM_39 = "5567a10000-5567a1a000 r-xp 00000000 08:01 1 cat\n7fc3a1b000-7fc3a3c000 rw-p 0 00:00 0 [stack]\n"


@pytest.mark.parametrize(("maps", "bits"), [(X86, 47), (ARM_48, 48), (ARM_39, 39), ("", None)])
def test_the_highest_address_tells(maps: str, bits: int | None) -> None:
    assert addresses.bits(maps) == bits


def test_a_narrow_kernel_is_refused_before_nvcc_runs(project: Path) -> None:
    cells = {cell.id: cell for cell in matrix.load(project).cells}
    for maps in (X86, ARM_48, ""):
        addresses.refuse_narrow(cells["llama-cu130-sm110"], maps)
    for name in ("llama-cpu", "vllm-cu130"):  # nothing is compiled with nvcc
        addresses.refuse_narrow(cells[name], ARM_39)
    with pytest.raises(BuildError, match="nvcc needs 47-bit addresses, this kernel has 39") as caught:
        addresses.refuse_narrow(cells["llama-cu130-sm110"], ARM_39)
    assert caught.value.exit_code == 60


def test_the_compilers_memory_begins_where_the_limit_says(project: Path) -> None:
    text = (project / "images/builder/fixed-addresses.c").read_text("utf-8")
    assert "next_map = 0x200000000000, break_at = 0x100000000000" in text
    assert (0x200000000000).bit_length() < addresses.NEEDED_BITS


def test_this_machine_says_what_it_has() -> None:
    assert (addresses.bits(addresses.here()) or 0) >= 39
