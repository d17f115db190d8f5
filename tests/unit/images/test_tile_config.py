"""Machine code around ldtilecfg: what gcc 12.2 made of llama.cpp's amx/mmq.cpp without and with our patch."""

from __future__ import annotations

import pytest

from images.builder.tile_config import faults, parse

# Without the barrier: 64 zeros, the palette, and nothing else.
BROKEN = """
   28255:	cmpb   $0x0,0x0(%rax)
   2825c:	jne    28283 <ggml_backend_amx_mul_mat+0x353>
   2825e:	vpxor  %xmm0,%xmm0,%xmm0
   28262:	vmovdqa64 %zmm0,0xc0(%rsp)
   2826a:	movb   $0x1,0xc0(%rsp)
   28272:	ldtilecfg 0xc0(%rsp)
   2827c:	movb   $0x1,0x0(%rax)
"""
SOUND = """
   27e6e:	vpxor  %xmm0,%xmm0,%xmm0
   27e72:	vmovdqa64 %zmm0,0xc0(%rsp)
   27e7a:	mov    0x0(%rip),%rdx        # 27e81 <ggml_backend_amx_mul_mat+0x341>
   27e81:	vmovdqa 0x0(%rip),%xmm0        # 27e89 <ggml_backend_amx_mul_mat+0x349>
   27e89:	movb   $0x1,0xc0(%rsp)
   27e91:	mov    %rdx,0xf0(%rsp)
   27e99:	vmovdqa %xmm0,0xd0(%rsp)
   27ea2:	ldtilecfg 0xc0(%rsp)
"""


def found(text: str) -> list[str]:
    return list(faults(parse(text.splitlines())))


def test_dropped_rows_and_columns_are_a_fault() -> None:
    assert found(BROKEN) == ["28272: ldtilecfg 0xc0(%rsp): rows and columns are not set before it"]


def test_what_the_patched_source_compiles_to_is_sound() -> None:
    assert found(SOUND) == []


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("   27e91:	mov    %rdx,0xf0(%rsp)\n", "rows"),
        ("   27e99:	vmovdqa %xmm0,0xd0(%rsp)\n", "columns"),
        ("   27e81:	vmovdqa 0x0(%rip),%xmm0", "columns"),  # then the zeros of vpxor are what is stored
    ],
)
def test_one_store_less_is_a_fault(line: str, missing: str) -> None:
    text = "\n".join(each for each in SOUND.splitlines() if not each.startswith(line.rstrip("\n")))
    assert found(text) == [f"27ea2: ldtilecfg 0xc0(%rsp): {missing} are not set before it"]


def test_stores_one_by_one_are_sound() -> None:
    text = """
    1000:	movw   $0x40,0x10(%rdi)
    1001:	movb   $0x8,0x30(%rdi)
    1002:	ldtilecfg (%rdi)
    """
    assert found(text) == []


@pytest.mark.parametrize("operand", ["0x10(%rsp,%rax,4)", "0x0(%rip)"])
def test_a_place_that_cannot_be_followed_is_a_fault(operand: str) -> None:
    assert len(found(f"  1002:	ldtilecfg {operand}")) == 1


def test_code_without_amx_has_no_fault() -> None:
    assert found("    1000:	movw   $0x40,0x10(%rdi)") == []
