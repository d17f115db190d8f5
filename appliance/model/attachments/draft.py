"""A small draft model for a large one; both must have the same tokens.

llama-server compares both vocabularies (common_speculative_are_compatible). If they differ, it serves without
speculation and says so only in its log. So they are compared here first, by the same rule.
"""

from __future__ import annotations

from pathlib import Path

from appliance.errors import FatalError, ModelUnreadableError
from appliance.model.architecture.facts import Model, parse_facts
from appliance.model.files.find import resolve_model
from appliance.model.formats.gguf import Gguf, Value, read_texts
from appliance.model.formats.parts import read_whole
from appliance.values import dataclass

SIZES_APART = 128  # SPEC_VOCAB_MAX_SIZE_DIFFERENCE: vocabularies are padded
FIRST_COMPARED = 5  # before it are <unk>, <s> and the like
_PREFIX = "tokenizer.ggml."
_ENDS = (("add_bos_token", "bos_token_id"), ("add_eos_token", "eos_token_id"))


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens of a model. `ends` holds the header's settings for tokens at the begin and end of a text; defaults are
    unknown here."""

    kind: str
    tokens: tuple[bytes, ...]
    ends: tuple[tuple[str, Value], ...] = ()


def read_draft(request: str, target: Model, models_dir: Path, source: str) -> Model:
    """Read the draft model for `target`.

    Raises ConfigError if it cannot be found, ModelUnreadableError if it is unreadable or has other tokens than
    `target`.
    """
    try:
        path = resolve_model(request, models_dir)
        gguf = read_whole(path)
    except FatalError as error:  # without the prefix, the message would seem to mean the model itself
        error.message = f"draft model ({source}): {error.message}"
        raise
    if why := why_different(read_vocabulary(read_whole(target.path)), read_vocabulary(gguf)):
        message = f"draft model has other tokens than {target.path.name}: {path.name} ({source}): {why}"
        raise ModelUnreadableError(message, hint="use a smaller model of the same family, or remove the draft model")
    return parse_facts(gguf)


def read_vocabulary(gguf: Gguf) -> Vocabulary:
    known = {name: gguf.metadata.get(_PREFIX + name) for pair in _ENDS for name in pair}
    kind = gguf.metadata.get(_PREFIX + "model")
    return Vocabulary(
        kind=kind if isinstance(kind, str) else "unknown",
        tokens=read_texts(gguf.path, _PREFIX + "tokens"),
        ends=tuple((name, value) for name, value in known.items() if value is not None),
    )


def why_different(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Return why one cannot draft for the other; None if the headers show no difference."""
    if target.kind != draft.kind:
        return f"its tokenizer is {draft.kind}, not {target.kind}"
    for adds, token in _ENDS:
        if why := _ends_differ(dict(target.ends), dict(draft.ends), adds, token):
            return why
    sizes = len(target.tokens), len(draft.tokens)
    if abs(sizes[0] - sizes[1]) > SIZES_APART:
        return f"it has {sizes[1]:,} tokens, not {sizes[0]:,}"
    pairs = zip(target.tokens[FIRST_COMPARED:], draft.tokens[FIRST_COMPARED:], strict=False)
    for number, (wanted, found) in enumerate(pairs, FIRST_COMPARED):
        if wanted != found:
            return f"its token {number} is {found.decode(errors='replace')!a}, not {wanted.decode(errors='replace')!a}"
    return None


def _ends_differ(target: dict[str, Value], draft: dict[str, Value], adds: str, token: str) -> str | None:
    """Compare whether both models add this token, and the same one; None if a header does not say so."""
    if adds not in target or adds not in draft:
        return None
    if target[adds] != draft[adds]:
        return f"its {adds} is {draft[adds]}, not {target[adds]}"
    if target[adds] and token in target and token in draft and target[token] != draft[token]:
        return f"its {token} is {draft[token]}, not {target[token]}"
    return None
