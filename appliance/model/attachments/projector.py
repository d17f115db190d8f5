"""A multimodal projector: what it reads, its models, and its size. From its header alone.

Keys, tensors and sizes are those of llama.cpp's tools/mtmd/clip.cpp (build 11312): `clip_n_mmproj_embd` gives the
length of a projector's vectors. The engine compares it with the model's only after loading both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from appliance.errors import ModelUnreadableError
from appliance.model.architecture.attached import MIB, Projector
from appliance.model.architecture.facts import Model
from appliance.model.formats.gguf import Gguf, read_gguf
from appliance.model.formats.keys import Keys

# Source of the vector length: the dimension with this number of the first tensor that exists. For kinds that are
# missing here it is unknown, and only the engine compares.
_LENGTHS: Mapping[str, tuple[tuple[str, int], ...]] = MappingProxyType({
    "adapter": (("adapter.linear.dense_4h_to_h.weight", 1),),
    "cogvlm": (("mm.down.weight", 1),),
    "deepseekocr": (("mm.model.fc.weight", 1),),
    "deepseekocr2": (("mm.model.fc.weight", 1),),
    "dots_ocr": (("mm.2.weight", 1),),
    "exaone4_5": (("mm.2.bias", 0),),
    "gemma3": (("mm.input_projection.weight", 0),),
    "gemma3nv": (("mm.input_projection.weight", 0),),
    "gemma4uv": (("mm.input_projection.weight", 1),),
    "gemma4v": (("mm.input_projection.weight", 1),),
    "glm4v": (("mm.down.weight", 1),),
    "glm5v": (("mm.down.weight", 1),),
    "hunyuanvl": (("mm.model.fc.weight", 1),),
    "idefics3": (("mm.model.fc.weight", 1),),
    "internvl": (("mm.model.mlp.3.weight", 1),),
    "janus_pro": (("mm.1.bias", 0),),
    "kimik25": (("mm.2.weight", 1),),
    "kimivl": (("mm.2.weight", 1),),
    "lfm2": (("mm.2.weight", 1),),
    "lightonocr": (("mm.2.weight", 1),),
    "llama4": (("mm.model.fc.weight", 1),),
    "minicpmv4_6": (("mm.down.weight", 1),),
    "mlp": (("mm.3.bias", 0), ("mm.2.weight", 1)),
    "nemotron_v2_vl": (("mm.model.mlp.3.weight", 1),),
    "paddleocr": (("mm.2.weight", 1),),
    "phi4": (("mm.2.weight", 1),),
    "pixtral": (("mm.2.weight", 1),),
    "qwen2.5o": (("mm.2.bias", 0), ("mm.a.fc.weight", 1)),
    "qwen2.5vl_merger": (("mm.2.bias", 0),),
    "qwen2a": (("mm.a.fc.weight", 1),),
    "qwen2vl_merger": (("mm.2.bias", 0),),
    "qwen3a": (("mm.a.mlp.2.weight", 1),),
    # row length of one of several vectors; those for later layers of the model are as long
    "qwen3vl_merger": (("mm.2.bias", 0),),
    "resampler": (("resampler.proj.weight", 0),),
    "step3vl": (("mm.model.fc.weight", 1),),
    "ultravox": (("mm.a.mlp.2.weight", 1),),
    "voxtral": (("mm.a.mlp.2.weight", 1),),
})  # fmt: skip
# Kinds that were trained only with models of these architectures; other kinds go with many (PROJECTOR_TYPE_NAMES in
# tools/mtmd/clip-impl.h, and the language models of the same families in src/models).
_FAMILIES: Mapping[str, frozenset[str]] = MappingProxyType({
    "cogvlm": frozenset({"cogvlm"}),
    "gemma3nv": frozenset({"gemma3n"}),
    "gemma4uv": frozenset({"gemma4"}),
    "gemma4v": frozenset({"gemma4"}),
    "glm4v": frozenset({"glm4", "glm4moe"}),
    "lfm2": frozenset({"lfm2", "lfm2moe"}),
    "llama4": frozenset({"llama4"}),
    "paddleocr": frozenset({"ernie4_5", "paddleocr"}),
    "qwen2.5vl_merger": frozenset({"qwen2vl"}),
    "qwen2vl_merger": frozenset({"qwen2vl"}),
    "qwen3vl_merger": frozenset({"qwen35", "qwen35moe", "qwen3vl", "qwen3vlmoe", "qwen4exp"}),
})  # fmt: skip
# Kinds that read an image in its own size, up to this many patches (4,096 tokens of 2 x 2, clip.cpp's
# set_limit_image_tokens); all others scale or tile it to one size.
_ANY_SIZE = ("dots_ocr", "exaone4_5", "glm4v", "glm5v", "kimik25", "kimivl", "lightonocr", "paddleocr", "pixtral",
             "qwen2.5o", "qwen2.5vl_merger", "qwen2vl_merger", "qwen3vl_merger", "youtuvl")  # fmt: skip
_PATCHES_ANY_SIZE = 16384
_OF_THIS_MODEL = "use the mmproj file of this model, or --mmproj off to serve text"
_USUAL_WORK_BYTES = 512 * MIB
_FRAMES = 3000  # for 30 s of sound, which an encoder reads at once


def read_projector(path: Path) -> Projector:
    """Read a projector. Raises ModelUnreadableError for any other file."""
    gguf = read_gguf(path)
    keys = Keys(gguf)
    if keys.architecture != "clip":
        keys.fail(f"it is not a multimodal projector but a model of {keys.architecture}", hint="give an mmproj file")
    towers = [tower for tower in ("vision", "audio") if keys.is_true(f"has_{tower}_encoder", default=False)]
    if not towers:
        keys.fail("it reads neither images nor audio", hint="give the mmproj file of the model")
    kind = keys.text("clip.projector_type") or keys.text(f"clip.{towers[0]}.projector_type") or "mlp"
    return Projector(
        path=path,
        kind=kind,
        reads=tuple({"vision": "image", "audio": "audio"}[tower] for tower in towers),
        length=_length(gguf, kind),
        weights_bytes=sum(tensor.size_bytes for tensor in gguf.tensors),
        work_bytes=sum(_work_bytes(keys, tower, kind) for tower in towers),
        header_bytes=gguf.header_bytes,
    )


def unread_projector(path: Path, size: int) -> Projector:
    """Projector that is not on the volume yet: its file size, and a usual value for its buffers."""
    return Projector(
        path=path,
        kind="",
        reads=("image",),
        length=None,
        weights_bytes=size,
        work_bytes=_USUAL_WORK_BYTES,
        header_bytes=0,
    )


def fits(projector: Projector, model: Model) -> bool:
    """True if the projector fits the model, as far as is known."""
    return projector.length in (None, model.embedding_length) and _other_family(projector, model) is None


def _other_family(projector: Projector, model: Model) -> frozenset[str] | None:
    """Return the architectures that the projector is for; None if the model's is among them or they are unknown."""
    family = _FAMILIES.get(projector.kind)
    return None if family is None or model.architecture in family else family


def check_match(projector: Projector, model: Model, source: str) -> None:
    """Raises ModelUnreadableError if the projector is for another model."""
    if projector.length is not None and projector.length != model.embedding_length:
        message = (
            f"projector is for another model: {projector.path.name} ({source}) gives vectors of {projector.length:,} "
            f"values, but {model.title} takes {model.embedding_length:,}"
        )
        raise ModelUnreadableError(message, hint=_OF_THIS_MODEL)
    _check_family(projector, model, source)


def _check_family(projector: Projector, model: Model, source: str) -> None:
    if family := _other_family(projector, model):
        message = (
            f"projector is for another model: {projector.path.name} ({source}), of kind {projector.kind}, is for "
            f"{' or '.join(sorted(family))}, but {model.title} is {model.architecture}"
        )
        raise ModelUnreadableError(message, hint=_OF_THIS_MODEL)


def _length(gguf: Gguf, kind: str) -> int | None:
    shapes = {tensor.name: tensor.shape for tensor in gguf.tensors}
    for name, at in _LENGTHS.get(kind, ()):
        shape = shapes.get(name)
        if shape is not None and len(shape) > at:
            return shape[at]
    return None


def _work_bytes(keys: Keys, tower: str, kind: str) -> int:
    """Size of the scheduler's buffer with flash attention.

    Measured: 121.25 MiB for 4,096 patches of 1,152 values with 4,304 in the feed-forward layer. That is 4 bytes x (3
    x width + feed-forward width). With a gate the feed-forward width counts twice.
    """
    width, wide = keys.number(f"{tower}.embedding_length", low=1), keys.number(f"{tower}.feed_forward_length")
    rows = _FRAMES if tower == "audio" else _patches(keys, kind)
    return 4 * rows * (3 * width + 2 * (wide or 4 * width))


def _patches(keys: Keys, kind: str) -> int:
    size, patch = keys.number("vision.image_size", low=1), keys.number("vision.patch_size", low=1)
    pixels = keys.number("vision.image_max_pixels", default=0)
    if pixels:
        return max(1, pixels // patch**2)
    return _PATCHES_ANY_SIZE if kind in _ANY_SIZE else max(1, size // patch) ** 2
