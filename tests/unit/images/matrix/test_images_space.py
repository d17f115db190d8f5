from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from images.errors import BuildError
from images.matrix import matrix, space
from images.matrix.matrix import Cell, Target
from images.matrix.space import Disk, Need

ARCHIVES, DATA = Path("/here/archives"), Path("/there/engine")


def test_the_need_follows_the_size_budget_and_cuda(cell: Cell) -> None:
    cpu = space.needs(cell, archives=ARCHIVES, engine_data=DATA)
    cuda_cell = replace(cell, target=Target(name="cu130-sm90", cuda="13.0", sms=("90",)))
    cuda = space.needs(cuda_cell, archives=ARCHIVES, engine_data=DATA)
    assert [need.mib for need in cpu] == [cell.size_budget_mib, space.TOOLS_MIB + 2 * cell.size_budget_mib]
    assert cuda[1].mib - cpu[1].mib == space.WHEELS_MIB
    assert [need.path for need in space.needs(cell, archives=ARCHIVES, engine_data=None)] == [ARCHIVES]


@pytest.mark.parametrize(
    ("cell_id", "mib"),
    [
        ("llama-cu130-sm90", space.TOOLKIT_MIB["wheels"] + space.SM_MIB),
        ("llama-cu130-sm86-sm120", space.TOOLKIT_MIB["wheels"] + 2 * space.SM_MIB),
        ("llama-cu124-sm89", space.TOOLKIT_MIB["debian"] + space.SM_MIB),
        ("llama-cu128-sm120", space.TOOLKIT_MIB["image"] + space.SM_MIB),
    ],
)
def test_a_toolkit_counts_by_where_it_is_from_and_objects_by_chip(project: Path, cell_id: str, mib: int) -> None:
    (cell,) = matrix.select(matrix.load(project).cells, cell_id)
    assert space.total_mib(cell) == 3 * cell.size_budget_mib + space.TOOLS_MIB + mib


def test_what_one_disk_must_hold_is_added_up(cell: Cell) -> None:
    needs = [Need(what="a", path=ARCHIVES, mib=600), Need(what="b", path=DATA, mib=500)]
    apart = {ARCHIVES: Disk(device=1, free_mib=600), DATA: Disk(device=2, free_mib=500)}
    space.refuse_full(cell, needs, apart.__getitem__)
    with pytest.raises(
        BuildError, match=r"needs 1100 MiB and 1099 MiB are free: 600 MiB for a in .*, 500 MiB"
    ) as caught:
        space.refuse_full(cell, needs, lambda _: Disk(device=1, free_mib=1099))
    assert caught.value.exit_code == 60
    assert "prune" in str(caught.value.hint)


def test_each_disk_is_judged_by_itself(cell: Cell) -> None:
    needs = [Need(what="a", path=ARCHIVES, mib=600), Need(what="b", path=DATA, mib=500)]
    disks = {ARCHIVES: Disk(device=1, free_mib=9999), DATA: Disk(device=2, free_mib=499)}
    with pytest.raises(BuildError, match="needs 500 MiB and 499 MiB are free"):
        space.refuse_full(cell, needs, disks.__getitem__)


def test_a_folder_that_is_not_there_yet_is_measured_where_it_will_be(tmp_path: Path) -> None:
    disk = space.query_disk(tmp_path / "not" / "yet")
    assert disk.device == tmp_path.stat().st_dev
    assert disk.free_mib > 0


def test_a_real_disk_is_asked(cell: Cell, tmp_path: Path) -> None:
    space.refuse_full(cell, [Need(what="nothing", path=tmp_path, mib=0)])
    with pytest.raises(BuildError, match="are free"):
        space.refuse_full(cell, [Need(what="everything", path=tmp_path, mib=2**40)])
