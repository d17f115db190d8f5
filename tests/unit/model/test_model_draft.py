"""Comparison of a draft model's tokens with the large model's, from their headers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError, ModelUnreadableError
from appliance.model import read_draft, read_model
from appliance.model.attachments.draft import FIRST_COMPARED, SIZES_APART, Vocabulary, read_vocabulary, why_different
from appliance.model.formats.gguf import read_gguf, read_texts
from tests.unit.model.gguf_files import LLAMA, write_model

WORDS = tuple(f"token{number}".encode() for number in range(300))
PLAIN = Vocabulary(kind="gpt2", tokens=WORDS, ends=(("add_bos_token", True), ("bos_token_id", 1)))


def test_texts_are_read_where_the_header_has_them(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tokens=200)
    assert read_texts(path, "tokenizer.ggml.tokens") == WORDS[:200]
    assert read_texts(path, "tokenizer.ggml.scores") == ()  # numbers
    assert read_texts(path, "tokenizer.ggml.nothing") == ()


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tokens=200)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(ModelUnreadableError, match="tokens of at most 143, found 200"):
        read_texts(cut, "tokenizer.ggml.tokens")


def test_a_model_of_the_same_tokens_drafts(tmp_path: Path) -> None:
    target = read_model(write_model(tmp_path / "large.gguf", tokens=200))
    write_model(tmp_path / "small.gguf", tokens=200, metadata={**LLAMA, "llama.block_count": 1}, tensors=None)
    write_model(tmp_path / "padded.gguf", tokens=200 + SIZES_APART)
    assert read_draft("padded", target, tmp_path, "flag --draft-model").vocabulary == 200 + SIZES_APART


def test_other_tokens_are_refused_with_both_names(tmp_path: Path) -> None:
    target = read_model(write_model(tmp_path / "large.gguf", tokens=100))
    write_model(tmp_path / "other.gguf", tokens=101 + SIZES_APART)
    with pytest.raises(ModelUnreadableError) as refusal:
        read_draft("other.gguf", target, tmp_path, "variable APPLIANCE_DRAFT_MODEL")
    assert "tokens than large.gguf: other.gguf (variable APPLIANCE_DRAFT_MODEL): it has 229 tokens, not 100" in str(
        refusal.value
    )
    for name, kind, words in (
        ("nothing", ConfigError, "no model of that name"),
        ("/nothing.gguf", ModelUnreadableError, "model cannot be opened: /nothing.gguf"),
    ):
        with pytest.raises(kind) as missing:
            read_draft(name, target, tmp_path, "flag --draft-model")
        assert missing.value.message.startswith(f"draft model (flag --draft-model): {words}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "llama"}, "its tokenizer is llama, not gpt2"),
        ({"ends": (("add_bos_token", False), ("bos_token_id", 1))}, "its add_bos_token is False, not True"),
        ({"ends": (("add_bos_token", True), ("bos_token_id", 2))}, "its bos_token_id is 2, not 1"),
        ({"ends": (("add_bos_token", True),)}, None),
        ({"ends": ()}, None),  # defaults of a tokenizer are the engine's to know
    ],
)
def test_what_differs_is_said(change: dict[str, object], words: str | None) -> None:
    assert why_different(PLAIN, replace(PLAIN, **change)) == words  # type: ignore[arg-type]


@given(st.integers(0, len(WORDS) - 1), st.integers(0, 2 * SIZES_APART))
def test_one_token_that_differs_is_found_where_the_engine_looks(at: int, fewer: int) -> None:
    other = (*WORDS[:at], b"\x1b[31m", *WORDS[at + 1 :])[: len(WORDS) - fewer]
    why = why_different(PLAIN, replace(PLAIN, tokens=other))
    if fewer > SIZES_APART:
        assert why == f"it has {len(WORDS) - fewer} tokens, not {len(WORDS)}"
    elif FIRST_COMPARED <= at < len(other):
        assert why == f"its token {at} is '\\x1b[31m', not 'token{at}'"
    else:
        assert why is None


def test_a_vocabulary_is_read_from_a_header(tmp_path: Path) -> None:
    found = read_vocabulary(read_gguf(write_model(tmp_path / "m.gguf")))
    assert found == Vocabulary(kind="unknown", tokens=WORDS[:100])
