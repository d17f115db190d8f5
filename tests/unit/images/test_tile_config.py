"""Machine code around ldtilecfg: what gcc 12.2 made of llama.cpp's amx/mmq.cpp without and with our patch, and gcc 14.2
with it."""

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
SOUND_BY_GCC_14 = """
   97dd9:	lea    0x12a038(%rip),%rdi        # 1c1e18 <_ZTVN4ggml3cpu3amx17extra_buffer_typeE@@Base+0x260>
   97de0:	call   15730 <__tls_get_addr@plt>
   97de5:	lea    0xc0(%rsp),%rdi
   97ded:	cmpb   $0x0,0x10600(%rax)
   97df4:	jne    97e36 <_Z24ggml_backend_amx_mul_matPK19ggml_compute_paramsP11ggml_tensor@@Base+0xa16>
   97df6:	vpxor  %xmm0,%xmm0,%xmm0
   97dfa:	mov    0xfdf87(%rip),%rdx        # 195d88 <ggml_gemm_q2_K_8x8_q8_K@@Base+0x103a8>
   97e01:	vmovdqa64 %zmm0,0xc0(%rsp)
   97e09:	vmovdqa 0xfdd9f(%rip),%xmm0        # 195bb0 <ggml_gemm_q2_K_8x8_q8_K@@Base+0x101d0>
   97e11:	movb   $0x1,0xc0(%rsp)
   97e19:	mov    %rdx,0xf0(%rsp)
   97e21:	vmovdqa %xmm0,0xd0(%rsp)
   97e2a:	ldtilecfg (%rdi)
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


def test_a_register_that_was_given_the_address_is_followed() -> None:
    assert found(SOUND_BY_GCC_14) == []
    both = "97e2a: ldtilecfg (%rdi): rows and columns are not set before it"
    assert found(SOUND_BY_GCC_14.replace("lea    0xc0(%rsp)", "lea    0x200(%rsp)")) == [both]
    assert found(SOUND_BY_GCC_14.replace("97e2a:", "97e29:	mov    %rax,%rdi\n   97e2a:")) == [both]
    assert found(SOUND_BY_GCC_14.replace("97e2a:", "97e29:	sub    $0x8,%rsp\n   97e2a:")) == [both]
    through = SOUND_BY_GCC_14.replace("0xf0(%rsp)", "0x30(%rdi)").replace("0xd0(%rsp)", "0x10(%rdi)")
    assert found(through) == []


@pytest.mark.parametrize(
    ("line", "missing"),
    [("   97e19:	mov    %rdx,0xf0(%rsp)\n", "rows"), ("   97e21:	vmovdqa %xmm0,0xd0(%rsp)\n", "columns")],
)
def test_one_store_less_is_a_fault_of_gcc_14_as_well(line: str, missing: str) -> None:
    assert found(SOUND_BY_GCC_14.replace(line, "")) == [f"97e2a: ldtilecfg (%rdi): {missing} are not set before it"]


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
