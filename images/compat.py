"""Whether a cell can exist. Pure; every refusal names the value and says what the choices are.

CUDA, SM, driver and compiler facts belong here once a cell needs them; today's cells have a base, platforms and CPU
variants.
"""

from __future__ import annotations

from collections.abc import Iterable

from images.errors import MatrixError
from images.matrix import Cell, Platform, Variants, near_miss


def check(cells: Iterable[Cell]) -> None:
    """MatrixError for the first cell that cannot exist."""
    for cell in cells:
        for platform in cell.platforms:
            _check_base(cell, platform)
            _check_variants(cell, platform)


def _check_base(cell: Cell, platform: Platform) -> None:
    if platform not in cell.base.platforms:
        message = f"cell {cell.id} cannot exist: base {cell.base.image} has no platform {platform}"
        raise MatrixError(message, hint=f"it has {', '.join(cell.base.platforms)}")


def _check_variants(cell: Cell, platform: Platform) -> None:
    variants = cell.engine.cpu_variants.get(platform, Variants(offered=(), built=()))
    for name in variants.built:
        if name not in variants.offered:
            message = f"cell {cell.id}: {cell.engine.title} offers no CPU variant for {platform} called: {name}"
            raise MatrixError(message, hint=near_miss(name, variants.offered) or ", ".join(variants.offered))
    # Without the baseline a machine that is older than every built variant finds no backend at all.
    if not variants.offered or variants.offered[0] not in variants.built:
        message = f"cell {cell.id}: the baseline CPU variant for {platform} is not built: {', '.join(variants.built)}"
        raise MatrixError(message, hint=f"add {variants.offered[0]}" if variants.offered else "list cpu_variants")
