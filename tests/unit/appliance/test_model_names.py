"""What people call the models of the recipes."""

from __future__ import annotations

import pytest

from appliance.host.docker.inventory import recipes_here
from appliance.model_names import nearest, resolve, rungs_named

RECIPES = recipes_here()


@pytest.mark.parametrize(
    ("called", "words"),
    [
        ("Qwen3-30B-A3B", "qwen:30b-a3b-q4_k_m"),
        ("qwen/qwen3-30b-a3b", "qwen:30b-a3b-q4_k_m"),
        ("QWEN3_30B_A3B", "qwen:30b-a3b-q4_k_m"),
        ("Qwen3-30B-A3B-Q4_K_M", "qwen:30b-a3b-q4_k_m"),
        ("qwen:30b-a3b", "qwen:30b-a3b"),
        ("Qwen3-30B-A3B-Instruct-2507", "qwen:30b-a3b-2507"),
        ("Qwen3-30B-A3B-2507", "qwen:30b-a3b-2507"),
        ("Qwen3-8B", "qwen:8b"),
        ("unsloth/qwen3-8b", "qwen:8b"),
        ("qwen3:8b", "qwen:8b"),
        ("qwen:8b-q6", "qwen:8b-q6_k"),
        ("Qwen3-4B", "qwen:4b-q4_k_m"),
        ("qwen3.5", "qwen:3.5"),
        ("qwen3-5:4b", "qwen:3.5-4b-q4_k_m"),
        ("Qwen3.8-27B", "qwen:3.8-27b-ud-q4_k_m"),
        ("Qwen3-14B-AWQ", "qwen:14b-awq"),
        ("qwen3", "qwen"),
        ("Qwen", "qwen"),
        ("gpt-oss-20b", "gpt-oss:20b-mxfp4"),
        ("gpt-oss:20b", "gpt-oss:20b-mxfp4"),
        ("openai/gpt-oss-20b", "gpt-oss:20b-mxfp4"),
        ("gptoss-120b", "gpt-oss:120b-mxfp4"),
        ("GPT_OSS:latest", "gpt-oss"),
        ("gemma3:27b", "gemma:3-27b-q4_k_m"),
        ("google/gemma-4-E4B-it", "gemma:e4b-q4_k_m"),
        ("gemma-4-e4b", "gemma:e4b"),
        ("SmolLM2-135M-Instruct", "demo"),
    ],
)
def test_one_model_in_many_spellings(called: str, words: str) -> None:
    meant = resolve(called, RECIPES)
    assert meant is not None
    assert meant.words == words


@pytest.mark.parametrize(
    "called",
    [
        *("Qwen3.6-27B", "qwen3-5b", "qwen3-2b", "qwen3-3", "qwen3:27b", "Qwen2.5-7B", "mistral", "ge", "b", "-", "8b"),
        # A repository, a file of one, and somebody else's model of the same name.
        *("Qwen/Qwen3-8B-GGUF", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "qwen/qwen3-8b:q6_k", "Qwen/Qwen3-8B@main"),
        *("somebody/Qwen3-8B", "hf.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q6_K.gguf", "/Qwen3-8B", "qwen/"),
    ],
)
def test_what_is_no_model_of_a_recipe(called: str) -> None:
    assert resolve(called, RECIPES) is None


@pytest.mark.parametrize(
    ("called", "near"),
    [
        ("Qwen3.6-27B", "Qwen3.8-27B"),
        ("qwen/Qwen3.6-27B", "Qwen3.8-27B"),
        ("quen", "qwen"),
        ("gpt-os-20b", "gpt-oss-20b"),
        ("Qwen3-30B-A3", "Qwen3-30B-A3B"),
    ],
)
def test_the_nearest_is_a_name_that_can_be_typed(called: str, near: str) -> None:
    offered = nearest(called, RECIPES)
    assert near in offered
    assert all(resolve(name, RECIPES) for name in offered)
    assert nearest("llama3.1:8b", RECIPES) == ()


def test_every_published_name_means_its_own_rung() -> None:
    for recipe in RECIPES:
        for rung in recipe.rungs:
            for name in (f"{recipe.name}:{rung.name}", *rung.published):
                assert rung.name in rungs_named(name, recipe), name
