"""A toolkit made here in the place of NVIDIA's image: of which cells it can be, and what it says that it is."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from images import __main__ as command
from images import docker
from images.build import build, substitute
from images.choice import proofs
from images.errors import BuildError, UsageError
from images.matrix import matrix
from images.pins import debian

MADE = "sha256:" + "3" * 64


@pytest.mark.parametrize(
    ("cell_id", "said"),
    [
        ("llama-cpu", "stands for CUDA 12.8 alone: llama-cpu"),
        ("llama-cu129-sm103", "stands for CUDA 12.8 alone: llama-cu129-sm103"),
        ("llama-cu128-sm100", "nvcc, which has no target sm_100: llama-cu128-sm100"),
        ("llama-cu128-sm120", "nvcc, which has no target sm_120a: llama-cu128-sm120"),
    ],
)
def test_it_is_refused_for_what_its_compiler_cannot_make(project: Path, cell_id: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        substitute.refuse(matrix.select(matrix.load(project).cells, cell_id)[0])


@pytest.mark.parametrize("sm", ["75", "80", "86", "89", "90"])
def test_it_is_a_toolkit_of_the_others(project: Path, sm: str) -> None:
    substitute.refuse(matrix.select(matrix.load(project).cells, f"llama-cu128-sm{sm}")[0])


def test_its_stages_are_those_of_a_cell_as_far_as_nvcc(project: Path) -> None:
    """Byte for byte, so that 2 GB of Debian's packages are fetched once; nothing of the engine is in its context."""
    cell, text = substitute.dockerfile(project, matrix.load(project))
    own = (project / cell.folder / "Dockerfile").read_text("utf-8")
    assert own.startswith(text[: text.index("\n# A folder as NVIDIA's devel image")])
    assert [name for _, name in debian.STAGE.findall(text)][-2:] == ["nvcc", "laid-out"]
    assert "compile-cuda" not in text
    home = f"/usr/local/cuda-{substitute.CUDA}"
    assert f"COPY --from=laid-out {home} {home}" in text
    taken = (project / "images/rendered/llama-cu128-sm86/Dockerfile").read_text("utf-8")
    assert re.findall(r"COPY --from=toolkit (\S+)", taken) == [home, "/NGC-DL-CONTAINER-LICENSE"]


class Having(docker.Engine):
    """An engine with the toolkit that was made here."""

    def image(self, reference: str) -> docker.Image | None:
        labels = {"io.appliance.toolkit": "Debian's nvcc 12.4.131"} if reference == substitute.TAG else {}
        return docker.Image(id=MADE, tags=(reference,), digests=(), config={"Labels": labels})


@pytest.mark.parametrize("words", [["build", "--only"], ["verify", "--reproduce"]])
def test_a_dry_run_takes_what_was_made_earlier(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docker, "Engine", Having)
    more = ["--toolkit-image", "substitute", "--base", "auto", "--dry-run"]
    assert command.main([*words, "llama-cu128-sm86", *more]) == 0
    assert f"=docker-image://{substitute.TAG}" in capsys.readouterr().out
    for cell_id, said in (("llama-cu129-sm103", "for CUDA 12.8 alone"), ("llama-cu128-sm120", "no target sm_120a")):
        assert command.main([*words, cell_id, *more]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr(Having, "image", lambda *_: None)
    assert command.main([*words, "llama-cu128-sm86", *more]) == 60
    said = capsys.readouterr().err
    assert f"was not made here yet: {substitute.TAG}" in said
    assert "without --dry-run makes it first" in said


@pytest.mark.parametrize("words", [["build", "--only"], ["verify", "--reproduce"]])
def test_it_is_made_for_builds_and_reproductions(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "Engine", Having)
    monkeypatch.setattr(Having, "platform", "linux/amd64")
    made: list[str] = []

    def make(*given: object) -> str:
        made.append("enough")
        raise BuildError(made[0])

    monkeypatch.setattr(substitute, "make", make)
    argv = [*words, "llama-cu128-sm86", "--toolkit-image", "substitute", "--base", "auto"]
    assert (command.main(argv), made) == (60, ["enough"])


def test_label_and_proof_say_what_it_is(project: Path) -> None:
    cell = matrix.select(matrix.load(project).cells, "llama-cu128-sm86")[0]
    chosen = build.choose_toolkit(cell, substitute.TAG, Having())
    assert chosen == build.BaseChoice(
        identity=MADE, context=f"docker-image://{substitute.TAG}", override="Debian's nvcc 12.4.131"
    )
    other = build.choose_toolkit(cell, "cuda:mine", Having())
    assert other
    assert other.override == "cuda:mine"
    proof = proofs.of_checks(
        cell,
        "linux/amd64",
        {"size": "900 MiB of 1400 MiB"},
        digest=MADE,
        commit="a" * 40,
        today=date(2026, 11, 22),
        machine="a machine",
        toolkit=f"{chosen.override} {MADE}",
    )
    assert str(proof).startswith(
        f"substitute toolkit on 2026-11-22, built of {'a' * 40} with Debian's nvcc 12.4.131 {MADE} in place of the"
    )

    pinned = cell.toolkit and cell.toolkit.image and cell.toolkit.image.digest
    said = {"io.appliance.toolkit-override": f"cuda:mine {MADE}"}
    assert build.other_toolkit(cell, said) == f"cuda:mine {MADE}"
    assert build.other_toolkit(cell, {"io.appliance.toolkit-override": f"mirror/cuda:12.8.1 {pinned}"}) is None
    assert build.other_toolkit(cell, {}) is None
