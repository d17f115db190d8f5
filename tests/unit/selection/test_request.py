"""Which model a start serves: names of the volume, rungs of a recipe, repositories; and what a choice remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError, ModelUnreadableError
from appliance.image_facts import Recipe, RecipeFile, Rung
from appliance.probe import Hardware
from appliance.selection.recipe import variants_called, wanted_variant
from appliance.selection.remote import tier_of
from appliance.selection.request import FromHub, FromRecipe, Request, ollama_hint, which_model
from appliance.selection.saved_choice import Better, Saved, SavedChoice
from appliance.settings import HubSettings, Settings, resolve_settings
from appliance.start.inputs import Located
from tests.golden.machines import MACHINES
from tests.unit.weights.cache_files import put_ollama

NAMES = ("4b-q4_k_m", "8b-q4_k_m", "8b-q6_k", "3.5-9b-q4_k_m", "35b-q4_k_m")


def rung(name: str, **given: Any) -> Rung:
    file = RecipeFile(path=f"M-{name}.gguf", bytes=4, sha256="a" * 64)
    known: dict[str, Any] = {
        "name": name, "tier": "balanced", "format": "gguf", "repo": "org/M-GGUF", "revision": "c" * 40, "url": None,
        "files": (file,), "parameters_b": 8.0, "active_b": 8.0, "loss": None, "loss_source": None, "shape": None,
        "source": "a test",
    }  # fmt: skip
    return Rung(**known | given)


RECIPE = Recipe(
    name="qwen", license="x", rungs=tuple(map(rung, NAMES)), default="4b-q4_k_m", chat={}, reasoning=None, tools=None,
    speculation=None, projector=None,
)  # fmt: skip


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def which(models: Path, request: str | None = None, recipe: Recipe | None = RECIPE) -> Request:
    settings = resolve_settings({"data_dir": str(models.parent), **({"model": request} if request else {})}, {})
    return which_model(settings, recipe, "gguf", HubSettings)


@pytest.mark.parametrize(("called", "names"), [("M-8B-Q6_K", ["8b-q6_k"]), ("m-8b", ["8b-q4_k_m", "8b-q6_k"])])
def test_a_published_name_means_the_recipes_rungs(models: Path, called: str, names: list[str]) -> None:
    found = which(models, called)
    assert isinstance(found, FromRecipe)
    assert [each.name for each in found.variants] == names
    with pytest.raises(ConfigError):
        which(models, "M-99B")


def put(models: Path, name: str, data: bytes = b"GGUF") -> Path:
    path = models / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def offered(found: Request) -> list[str]:
    assert isinstance(found, FromRecipe)
    return [each.name for each in found.variants]


def test_without_a_name_the_recipe_and_without_one_the_only_model(models: Path) -> None:
    put(models, "mine.gguf")
    assert offered(which(models)) == list(NAMES)
    assert which(models, recipe=None) == Located(path=models / "mine.gguf")


@pytest.mark.parametrize(
    ("request_text", "names"),
    [
        ("qwen", NAMES),
        ("QWEN", NAMES),
        ("qwen:8b", ("8b-q4_k_m", "8b-q6_k")),
        ("qwen:8b-q4", ("8b-q4_k_m",)),
        ("qwen:8B-Q4KM", ("8b-q4_k_m",)),
        ("qwen:3.5", ("3.5-9b-q4_k_m",)),
        ("qwen:35", ("35b-q4_k_m",)),
    ],
)
def test_a_recipe_and_the_beginning_of_a_rung(models: Path, request_text: str, names: tuple[str, ...]) -> None:
    assert offered(which(models, request_text)) == list(names)


@pytest.mark.parametrize(
    ("request_text", "hint"),
    [("qwen:8b-q5_k_m", "perhaps you meant qwen:8b-q"), ("qwen:700b", "there are qwen:4b-q4_k_m, "),
     ("qwn", "perhaps you meant qwen"), ("nothing", "put the file into")],
)  # fmt: skip
def test_a_near_miss_is_named(models: Path, request_text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        which(models, request_text)
    assert hint in (caught.value.hint or "")


def test_a_file_of_the_volume_goes_before_a_recipe_of_its_name(models: Path) -> None:
    put(models, "qwen.gguf")
    assert which(models, "qwen.gguf") == Located(path=models / "qwen.gguf")
    assert which(models, "qwen") == Located(path=models / "qwen.gguf")


def test_a_folder_named_like_the_recipe_does_not_hide_it(models: Path) -> None:
    (models / "qwen").mkdir()
    assert offered(which(models, "qwen")) == list(NAMES)
    put(models, "qwen/a.gguf")
    assert offered(which(models, "qwen")) == list(NAMES)
    with pytest.raises(ModelUnreadableError, match="model is a folder"):
        which(models, str(models / "qwen"))
    with pytest.raises(ModelUnreadableError, match="model is a folder"):
        which(models, "qwen", recipe=None)


def test_a_folder_of_a_repository_goes_before_the_hub(models: Path) -> None:
    for name in ("R-Q4_K_M.gguf", "R-Q8_0.gguf", "R-mmproj-F16.gguf", "R-BF16-00001-of-00002.gguf"):
        put(models, f"org/repo/{name}")
    assert which(models, "org/repo") == Located(path=models / "org/repo/R-Q4_K_M.gguf", names=("org/repo",))
    assert which(models, "org/repo:Q8_0") == Located(path=models / "org/repo/R-Q8_0.gguf", names=("org/repo:Q8_0",))
    for request in ("org/repo:BF16", "org/repo:Q6_K", "org/repo@main", "org/other"):
        assert isinstance(which(models, request), FromHub)
    (models / "org/empty").mkdir()
    assert isinstance(which(models, "org/empty"), FromHub)


def test_a_name_of_the_recipe_that_ollama_has_too(models: Path, tmp_path: Path) -> None:
    put_ollama(tmp_path / "ollama/models", "library/qwen/8b-q4_k_m", b"GGUF")
    put_ollama(tmp_path / "ollama/models", "library/qwen/7b", b"GGUF7")
    given = {"data_dir": str(models.parent), "model_dirs": str(tmp_path / "ollama")}

    def asked(model: str) -> Settings:
        return resolve_settings({**given, "model": model}, {})

    has_too = f"Ollama's folder {tmp_path}/ollama/models has one of that name, too: `--model library/"
    assert offered(which_model(asked("qwen:8b-q4_k_m"), RECIPE, "gguf", HubSettings)) == ["8b-q4_k_m"]
    assert ollama_hint(asked("qwen:8b-q4_k_m"), RECIPE) == f"{has_too}qwen:8b-q4_k_m`"
    assert [ollama_hint(asked(name), RECIPE) for name in ("qwen:4b", "other:7b", "library/qwen:7b")] == [None] * 3
    with pytest.raises(ConfigError) as caught:
        which_model(asked("qwen:7b"), RECIPE, "gguf", HubSettings)
    assert (caught.value.hint or "").startswith(f"{has_too}qwen:7b`; there are qwen:4b-q4_k_m")
    found = which_model(asked("library/qwen:7b"), RECIPE, "gguf", HubSettings)
    assert isinstance(found, Located)
    assert found.called == "qwen:7b"


@pytest.mark.parametrize("place", ["M-8b-q6_k.gguf", f"models--org--M-GGUF/snapshots/{'c' * 40}/M-8b-q6_k.gguf"])
def test_a_rung_that_is_here_by_hand_or_fetched(models: Path, place: str) -> None:
    path = put(models, place)
    assert which(models, "qwen:8b-q6") == Located(path=path, names=("qwen", "qwen:8b-q6_k"))
    found = which(models)
    assert isinstance(found, FromRecipe)
    assert found.here == ((RECIPE.rungs[2], path),)


def test_a_file_of_another_size_is_not_the_rung(models: Path) -> None:
    put(models, "M-8b-q6_k.gguf", b"GGUF and more")
    assert isinstance(which(models, "qwen:8b-q6"), FromRecipe)
    bare = replace(RECIPE, rungs=(rung("8b-q6_k", repo=None, revision=None),))
    assert isinstance(which(models, "qwen", bare), Located)  # there is no address for the right one


def test_a_recipe_without_an_address_says_what_is_missing(models: Path) -> None:
    bare = replace(RECIPE, rungs=(rung("8b-q6_k", repo=None, revision=None),))
    with pytest.raises(ConfigError, match="recipe is not on the volume") as caught:
        which(models, recipe=bare)
    assert str(models / "M-8b-q6_k.gguf") in caught.value.message


def test_rungs_of_another_format_are_passed_over(models: Path) -> None:
    mixed = replace(RECIPE, rungs=(*RECIPE.rungs, rung("8b-bf16", format="safetensors")))
    assert offered(which(models, recipe=mixed)) == list(NAMES)
    with pytest.raises(ConfigError, match="no such model for this engine"):
        variants_called("", [], "qwen")


def test_what_pull_means_by_a_name_of_the_recipe() -> None:
    found = wanted_variant("Qwen:8b-q6", RECIPE, "gguf", HubSettings())
    assert found is not None
    assert (found.repo, found.name, [file.path for file in found.files]) == (
        *("org/M-GGUF", "Qwen:8b-q6"),
        ["M-8b-q6_k.gguf"],
    )
    assert wanted_variant("org/qwen", RECIPE, "gguf", HubSettings()) is None
    assert wanted_variant("qwen:8b", None, "gguf", HubSettings()) is None
    with pytest.raises(ConfigError, match="name means 2 models of the recipe: qwen:8b") as caught:
        wanted_variant("qwen:8b", RECIPE, "gguf", HubSettings())
    assert "one of qwen:8b-q4_k_m, qwen:8b-q6_k; `appliance plan --files`" in (caught.value.hint or "")


@pytest.mark.parametrize("request_text", ["org/repo", "org/repo:Q4_K_M", "hf.co/org/repo@main", "https://h/x.gguf"])
def test_what_can_only_be_elsewhere(models: Path, request_text: str) -> None:
    found = which(models, request_text)
    assert isinstance(found, FromHub)
    assert found.name == request_text


def test_a_repository_that_is_in_the_cache(models: Path) -> None:
    path = put(models, f"models--org--repo/snapshots/{'d' * 40}/R-Q4_K_M.gguf")
    put(models, "models--org--repo/refs/main", b"d" * 40)
    assert which(models, "org/repo") == Located(path=path, names=("org/repo",))
    assert which(models, "org/repo:Q4_K_M") == Located(path=path, names=("org/repo:Q4_K_M",))
    assert isinstance(which(models, "org/repo:Q8_0"), FromHub)


@pytest.mark.parametrize(
    ("request_text", "kind"), [("folder/m.gguf", ConfigError), ("/nowhere/m.gguf", ModelUnreadableError)]
)
def test_a_path_that_is_missing_is_no_repository(models: Path, request_text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        which(models, request_text)


@pytest.mark.parametrize(
    ("label", "tier"),
    [("Q8_0", "quality"), ("UD-Q6_K_XL", "quality"), ("BF16", "quality"), ("Q4_K_M", "balanced"), ("MXFP4", "balanced"),
     ("IQ4_XS", "balanced"), ("UD-Q2_K_XL", "compact"), ("IQ3_XXS", "compact"), ("", "balanced")],
)  # fmt: skip
def test_the_tier_that_a_label_tells(label: str, tier: str) -> None:
    assert tier_of(label) == tier


def kept(folder: Path, **given: Any) -> SavedChoice:
    here = {"qwen:a": Located(path=Path("/a")), "qwen:b": Located(path=Path("/b"))}
    settings = resolve_settings({}, {})
    return SavedChoice(
        **{"folder": folder, "settings": settings, "hardware": MACHINES["cpu-16g"], "here": here, **given}
    )


CHANGES: list[Callable[[], dict[str, Any]]] = [
    lambda: {"settings": resolve_settings({"ctx_size": "65536"}, {})},
    lambda: {"settings": resolve_settings({"tier": "compact"}, {})},
    lambda: {"here": {"qwen:b": Located(path=Path("/b"))}},
]


def save(choice: SavedChoice, **given: Any) -> None:
    choice.save("qwen:b", Located(path=Path("/b")), **given)


@pytest.mark.parametrize("change", CHANGES)
def test_a_choice_is_made_anew_when_the_question_changes(tmp_path: Path, change: Callable[[], dict[str, Any]]) -> None:
    save(kept(tmp_path), better=Better(name="qwen:c", bytes=7, is_here=False))
    assert kept(tmp_path).load() == Saved(
        name="qwen:b",
        located=Located(path=Path("/b")),
        better=Better(name="qwen:c", bytes=7, is_here=False),
        is_current=True,
    )
    assert kept(tmp_path, settings=resolve_settings({"port": "1234"}, {})).load() is not None
    assert kept(tmp_path, **change()).load() is None


def test_a_file_that_was_written_anew_is_chosen_anew(tmp_path: Path) -> None:
    file = put(tmp_path, "b.gguf")
    here = {"qwen:b": Located(path=file)}
    kept(tmp_path, here=here).save("qwen:b", here["qwen:b"])
    assert kept(tmp_path, here=here).load() is not None
    put(tmp_path, "b.gguf", b"GGUF, another")
    assert kept(tmp_path, here=here).load() is None


def with_room(*, volume_mib: int = 100_000, memory_mib: int = 14_000) -> Hardware:
    found = MACHINES["cpu-16g"]
    memory = replace(found.memory, available_mib=memory_mib)
    return replace(found, volume=replace(found.volume, free_mib=volume_mib), memory=memory)


@pytest.mark.parametrize(
    ("now", "is_current"),
    [
        (with_room(), True),
        (with_room(memory_mib=13_000), True),
        (with_room(memory_mib=9_000), False),
        (with_room(memory_mib=20_000), False),
        (with_room(volume_mib=10), True),  # what was chosen is on it
        (with_room(volume_mib=150_000), False),
        (MACHINES["h200"], False),
    ],
)
def test_a_choice_is_looked_at_again_when_there_is_other_room(
    tmp_path: Path, now: Hardware, *, is_current: bool
) -> None:
    save(kept(tmp_path, hardware=with_room()))
    found = kept(tmp_path, hardware=now).load()
    assert found is not None
    assert found.is_current == is_current


def test_what_was_fetched_since_is_no_other_room(tmp_path: Path) -> None:
    save(kept(tmp_path, hardware=with_room(volume_mib=100_000)), fetched_bytes=60_000 * 2**20)
    found = kept(tmp_path, hardware=with_room(volume_mib=55_000)).load()
    assert found is not None
    assert not found.is_current


def test_a_choice_that_cannot_be_kept_or_read_is_none(tmp_path: Path) -> None:
    save(kept(tmp_path / "missing"))
    assert kept(tmp_path / "missing").load() is None
    of_an_older_version = '{"key": "a", "here": ["qwen:a"], "chosen": "qwen:a"}'
    for text in ("", "[]", "{}", '{"key": 1}', "null", of_an_older_version):
        (tmp_path / "choice.json").write_text(text)
        assert kept(tmp_path).load() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"asked": null}', "[" * 100_000, '{"asked": 1e999}'])
def test_a_kept_choice_that_is_damaged_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "choice.json").write_text(text)
    assert kept(tmp_path).load() is None
