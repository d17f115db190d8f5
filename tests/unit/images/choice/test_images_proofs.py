"""What is written down of images that were built."""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from appliance.image_facts import ENGINE_FACTS_PATH, dump_facts, parse_engine_facts
from images import __main__ as command
from images import docker
from images.build import packages
from images.choice import explain, proofs, select
from images.choice.gpus import Gpu
from images.choice.proofs import Proof, Record
from images.console import ROOT
from images.errors import MatrixError, VerificationError
from images.matrix import matrix, render, timing
from images.matrix.matrix import Cell, Platform
from images.proof import cell_facts, verify
from images.verbs.prove.verify import record
from images.verbs.show.list import state_of
from tests.builders import ENGINE

LOADED = matrix.load(Path(__file__).parents[4])
PLATFORMS: dict[str, tuple[Platform, ...]] = {
    "llama-cpu": ("linux/amd64",),
    "llama-cu130-sm90": ("linux/amd64", "linux/arm64"),
}
DIGEST = f"sha256:{'a' * 64}"
NEW = proofs.Here(digest=DIGEST, is_current=True)
SAID = {"size": "852 MiB of 1100 MiB", "kernels run natively": "k" * 500, "user is not root": "appliance"}


def _proof(cell: Cell) -> Proof:
    return proofs.of_checks(
        cell, "linux/amd64", SAID, digest=DIGEST, commit="f" * 40, today=date(2026, 11, 22), machine="2 CPUs, no GPU"
    )


def test_the_committed_rows_are_about_cells_and_written_as_record_writes_them(project: Path) -> None:
    known = proofs.load(project, matrix.load(project).cells)
    assert {"llama-cpu", "llama-cu130-sm90"} <= {cell for cell, _ in known}
    assert proofs.dump(known.values()) == (project / proofs.PROOFS_FILE).read_text("utf-8")


def test_no_proof_is_an_input_of_a_build_id(project: Path) -> None:
    for cell in matrix.load(project).cells:
        assert proofs.PROOFS_FILE not in render.inputs(cell)


def test_what_verify_saw_is_kept_in_short(cell: Cell) -> None:
    proof = _proof(cell)
    assert (proof.size_mib, proof.digest, proof.commit) == (852, DIGEST, "f" * 40)
    assert proof.ran[0] == "verify, 3 checks"
    assert proof.ran[1].startswith("kernels run natively: kkk")
    assert len(proof.ran[1]) < 250
    assert str(proof).startswith(f"proven on 2026-11-22, built of {'f' * 40}: verify, 3 checks; ")


def test_a_new_row_takes_the_place_of_the_old_one(project: Path, tmp_path: Path, cell: Cell) -> None:
    cells = matrix.load(project).cells
    (tmp_path / "images").mkdir()
    (tmp_path / proofs.PROOFS_FILE).write_text((project / proofs.PROOFS_FILE).read_text("utf-8"), "utf-8")
    before = proofs.load(tmp_path, cells)
    proofs.record(tmp_path, cells, _proof(cell))
    after = proofs.load(tmp_path, cells)
    assert after.keys() == before.keys()
    assert after["llama-cpu", "linux/amd64"] == _proof(cell)


def test_what_is_not_known_stays_not_known() -> None:
    text = "proofs: [{cell: llama-cpu, platform: linux/amd64, commit: null, digest: null, date: 2026-11-21, "
    text += "machine: null, size_mib: null, ran: [x], digest_reproducible: null}]"
    (proof,) = proofs.parse(yaml.safe_load(text), PLATFORMS).values()
    assert str(proof) == "proven on 2026-11-21, built of a commit that is not known: x"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("llama-cpu", "llama-cpx", "no cell of the matrix is llama-cpx on linux/amd64"),
        ("linux/amd64", "linux/arm64", "no cell of the matrix is llama-cpu on linux/arm64"),
        ("date: 2026-11-21", "day: 2026-11-21", "unknown key: proofs.0.day"),
        ("commit: null", "commit: main", "proofs.0.commit: String should match pattern"),
        ("commit: null", f"commit: {'f' * 40}+dirty", "proofs.0.commit: String should match pattern"),
        ("size_mib: null", "size_mib: true", "proofs.0.size_mib: Input should be a valid integer: True"),
        ("ran: [x]", "ran: []", "proofs.0.ran: Tuple should have at least 1 item"),
        ("reproducible: null", "reproducible: true", "digest_reproducible is true, and how it was built is not known"),
        (
            "reproducible: null",
            "reproducible: true, build_seconds: 9, kept: [x]",
            "digest_reproducible is true, and kept: x",
        ),
        (", digest_reproducible: null", "", "digest_reproducible"),
    ],
)
def test_a_row_that_says_something_else_is_refused(old: str, new: str, said: str) -> None:
    text = "proofs: [{cell: llama-cpu, platform: linux/amd64, commit: null, digest: null, date: 2026-11-21, "
    text += "machine: null, size_mib: null, ran: [x], digest_reproducible: null}]"
    with pytest.raises(MatrixError) as caught:
        proofs.parse(yaml.safe_load(text.replace(old, new)), PLATFORMS)
    assert said in caught.value.message


def test_a_cell_that_is_there_twice_is_refused(cell: Cell) -> None:
    with pytest.raises(MatrixError, match="a cell is there twice: llama-cpu on linux/amd64"):
        proofs.parse(yaml.safe_load(proofs.dump([_proof(cell), _proof(cell)])), PLATFORMS)


def test_no_file_at_all_is_said(tmp_path: Path, cell: Cell) -> None:
    with pytest.raises(MatrixError, match=r"images/proven\.yaml cannot be read: No such file"):
        proofs.load(tmp_path, [cell])


def test_proven_built_or_rendered_is_of_a_platform(cell: Cell) -> None:
    amd, arm = cell.platforms
    here = Record(here={"appliance:llama-cpu": NEW}, own=amd)
    proven = Record(proofs={("llama-cpu", amd): _proof(cell)}, here=here.here, own=amd)
    assert [proven.state(cell, each) for each in (amd, arm)] == ["proven", "rendered"]
    assert [here.state(cell, each) for each in (amd, arm)] == ["built", "rendered"]
    assert Record(here={"appliance:llama-cu130-sm90": NEW}, own=amd).state(cell, amd) == "rendered"
    assert Record().describe(cell, amd) == "rendered, never built"
    assert not proven.has(cell, arm)


@pytest.mark.parametrize(
    ("written", "here", "said"),
    [
        (DIGEST, proofs.Here(digest=DIGEST, is_current=True), "is here: the image of that record, of this tree"),
        (f"{DIGEST[:15]}…aaaa", proofs.Here(digest=DIGEST, is_current=True), "the image of that record, of this tree"),
        (f"{DIGEST[:15]}…bbbb", proofs.Here(digest=DIGEST, is_current=True), f"another image, {DIGEST}, of this tree"),
        (None, proofs.Here(digest=DIGEST, is_current=True), f"another image, {DIGEST}, of this tree"),
        (DIGEST, proofs.Here(digest=DIGEST, is_current=False), "record, of another tree, and `build` makes a new one"),
        (DIGEST, proofs.Here(digest="sha256:1", is_current=False), "another image, sha256:1, of another tree, and `bu"),
    ],
)
def test_which_image_is_here_is_told(cell: Cell, written: str | None, here: proofs.Here, said: str) -> None:
    row = _proof(cell).model_copy(update={"digest": written})
    record = Record(proofs={("llama-cpu", "linux/amd64"): row}, here={cell.tag: here}, own="linux/amd64")
    assert f"; {cell.tag} is here: " in record.describe(cell, "linux/amd64")
    assert said in record.describe(cell, "linux/amd64")
    assert record.has(cell, "linux/amd64") is here.is_current
    unproven = Record(here={cell.tag: here}, own="linux/amd64")
    assert unproven.describe(cell, "linux/amd64").startswith("built, " if here.is_current else "built of another tree,")


def test_what_is_here_of_another_tree_is_fetched_by_a_build(cell: Cell) -> None:
    old = Record(here={cell.tag: proofs.Here(digest=DIGEST, is_current=False)}, own="linux/amd64")
    choice = select.choose(LOADED, select.Machine(platform="linux/amd64"), record=old)
    assert (choice.state, choice.is_here) == ("built of another tree", False)
    told = {each.name: each.value for each in explain.explain(cell.id, LOADED, record=old).follows}
    assert told["get it"] == "python3 -m images build --only llama-cpu --base auto"


def test_how_long_a_build_took_and_what_stood_for_the_pinned_is_written(cell: Cell, tmp_path: Path) -> None:
    row = proofs.of_checks(
        cell,
        "linux/amd64",
        SAID,
        digest=DIGEST,
        commit="f" * 40,
        today=date(2026, 11, 22),
        machine="2 CPUs, no GPU",
        took=timing.Took(digest=DIGEST, seconds=2214, kept=("base", "compile"), compressed_bytes=99_500_000),
        base=f"debian:bookworm-slim {DIGEST}",
    )
    assert proofs.parse(yaml.safe_load(proofs.dump([row])), PLATFORMS) == {("llama-cpu", "linux/amd64"): row}
    assert (row.state, row.digest_reproducible, row.compressed_bytes) == ("proven", False, 99_500_000)
    assert (
        f" on debian:bookworm-slim {DIGEST} in place of the pinned base in 37 min (base, compile done before)"
        in str(row)
    )


def test_the_time_kept_is_of_that_image_and_of_its_fullest_build(tmp_path: Path) -> None:
    first = timing.Took(digest=DIGEST, seconds=2214, kept=("base",))
    timing.save(tmp_path, "b1", first)
    timing.save(tmp_path, "b1", timing.Took(digest=DIGEST, seconds=9, kept=("base", "compile")))
    assert timing.load(tmp_path, "b1", DIGEST) == first
    assert timing.load(tmp_path, "b1", "sha256:other") is None
    assert timing.load(tmp_path, "b2", DIGEST) is None
    timing.save(tmp_path, "b1", timing.Took(digest="sha256:other", seconds=9, kept=("base", "compile")))
    assert timing.load(tmp_path, "b1", DIGEST) is None


def test_a_substitute_toolkit_proves_no_cell(cell: Cell) -> None:
    amd = cell.platforms[0]
    row = _proof(cell).model_copy(update={"toolkit": f"Debian's nvcc {DIGEST}"})
    record = Record(proofs={("llama-cpu", amd): row}, here={cell.tag: NEW}, own=amd)
    assert record.state(cell, amd) == "substitute toolkit"
    assert record.describe(cell, amd).startswith("substitute toolkit on 2026-11-22, built of")
    assert proofs.parse(yaml.safe_load(proofs.dump([row])), PLATFORMS) == {("llama-cpu", amd): row}
    older = _proof(cell).model_copy(update={"ran": ("verify, 28 checks", "substituted toolkit: Debian's nvcc")})
    assert (older.state, older.substitute) == ("substitute toolkit", "Debian's nvcc")
    assert "toolkit:" not in proofs.dump([_proof(cell)]).removeprefix(proofs.HEADER)


def test_a_substitute_toolkit_takes_no_proofs_place(project: Path, tmp_path: Path, cell: Cell) -> None:
    cells = matrix.load(project).cells
    (tmp_path / "images").mkdir()
    (tmp_path / proofs.PROOFS_FILE).write_text(proofs.dump([_proof(cell)]), "utf-8")
    other = _proof(cell).model_copy(update={"toolkit": f"Debian's nvcc {DIGEST}"})
    with pytest.raises(VerificationError, match="has a proof of llama-cpu with its own toolkit"):
        proofs.record(tmp_path, cells, other)
    (tmp_path / proofs.PROOFS_FILE).write_text(proofs.dump([other]), "utf-8")
    proofs.record(tmp_path, cells, _proof(cell))
    assert proofs.load(tmp_path, cells)["llama-cpu", "linux/amd64"].state == "proven"


@given(data=st.data())
def test_list_explain_and_select_agree(data: st.DataObject) -> None:
    """For any proofs and local images, `select` gives the state that `list` gives, and the text of `explain` begins
    with that state."""
    pairs = sorted((cell.id, platform) for cell in LOADED.cells for platform in cell.platforms)
    proven = data.draw(st.sets(st.sampled_from(pairs)))
    here = data.draw(st.sets(st.sampled_from([cell.tag for cell in LOADED.cells])))
    own = data.draw(st.sampled_from(get_args(Platform)))
    images = {tag: proofs.Here(digest=DIGEST, is_current=data.draw(st.booleans())) for tag in here}
    record = Record(proofs={pair: _proof(LOADED.cells[0]) for pair in proven}, here=images, own=own)
    sm, platform = data.draw(st.sampled_from([("90", own), ("103", own), (None, own)]))
    machine = select.Machine(platform=platform, gpus=(Gpu(name=f"SM {sm}", sm=sm),) if sm else ())
    choice = select.choose(LOADED, machine, record=record)
    cell = next(each for each in LOADED.cells if each.id == choice.cell)
    states = state_of(cell, record)["states"]
    told = {each.name: each.value for each in explain.explain(cell.id, LOADED, record=record).follows}
    assert isinstance(states, dict)
    assert choice.state == states[platform]
    assert all(told[f"state on {each}"].startswith(state) for each, state in states.items())
    assert choice.proof == told[f"state on {platform}"]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH, and empty: a machine without docker and nvidia-smi."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def _has_image(programs: Path, tag: str, labels: dict[str, str] | None = None) -> None:
    inspected = f"{DIGEST} {json.dumps([tag])} {json.dumps(labels)}"
    text = f"#!/bin/sh\ncase \"$2\" in ls) echo {tag} ;; *) echo '{inspected}'; echo No such image: x >&2 ;; esac\n"
    (programs / "docker").write_text(text)
    (programs / "docker").chmod(0o755)


def test_the_list_says_it_of_every_cell(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = matrix.select(LOADED.cells, "llama-cu124-sm75")[0]
    wanted = packages.build_id_of(ROOT, tree, "linux/amd64", {})
    _has_image(programs, "appliance:llama-cu124-sm75", {"io.appliance.build-id": wanted})
    assert command.main(["list"]) == 0
    rows = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    assert rows["llama-cu130-sm75"] == "proven"
    assert rows["llama-cpu"] == rows["llama-cu130-sm90"] == "amd64"  # proven; arm64 rendered
    assert rows["llama-cu124-sm75"] == "built"
    assert rows["llama-cu134-sm120"] == "rendered"


def test_an_image_of_another_tree_is_none_of_this(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for labels in (None, {"io.appliance.build-id": "b" * 32}):
        _has_image(programs, "appliance:llama-cu124-sm75", labels)
        assert command.main(["list", "--only", "llama-cu124-sm75"]) == 0
        assert "built of another tree" in capsys.readouterr().out


@pytest.mark.usefixtures("programs")
def test_without_an_engine_nothing_is_built_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--only", "llama-cu124-*"]) == 0
    assert " built " not in capsys.readouterr().out


class Engine(docker.Engine):
    platform = "linux/amd64"

    def image(self, name: str) -> docker.Image | None:
        config = {"Labels": {proofs.REVISION_LABEL: "f" * 40}}
        return docker.Image(id=DIGEST, tags=(name,), digests=(), platform=self.platform, config=config)

    def run(self, image: str, argv: tuple[str, ...], *, entrypoint: tuple[str, ...] | None = None) -> docker.Finished:
        assert (argv, entrypoint) == ((ENGINE_FACTS_PATH,), ("cat",))
        return docker.Finished(code=0, lines=tuple(dump_facts(ENGINE).splitlines()))


@pytest.mark.usefixtures("programs")
def test_what_was_verified_is_recorded(
    project: Path, tmp_path: Path, cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(project / "images/locks", tmp_path / "images/locks")
    for name in ("build_matrix.yaml", str(proofs.PROOFS_FILE)):
        shutil.copyfile(project / name, tmp_path / name)
    checks = [verify.Check(name=name, ok=True, detail=detail) for name, detail in SAID.items()]
    record(tmp_path, cell, checks, Engine(), image="x:1")
    proof = proofs.load(tmp_path, [*matrix.load(project).cells])["llama-cpu", "linux/amd64"]
    assert (proof.digest, proof.commit, proof.size_mib) == (DIGEST, "f" * 40, 852)
    assert str(proof.machine).endswith("CPUs, no GPU")
    said = capsys.readouterr().err
    assert "recorded in images/proven.yaml: proven on " in said
    path = "appliance/engines/llama/cells/llama-cpu.json"
    assert f"engine facts are in {path}" in said
    assert parse_engine_facts((tmp_path / path).read_text()) == ENGINE


def test_facts_that_are_none_are_not_recorded(tmp_path: Path, cell: Cell) -> None:
    with pytest.raises(VerificationError, match="engine facts of llama-cpu cannot be recorded: engine facts are not"):
        cell_facts.record(tmp_path, cell, "cat: /opt/appliance/engine_facts.json: No such file or directory")
    assert not (tmp_path / "appliance").exists()


def test_an_image_of_an_edited_tree_is_not_recorded(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes before the image's checks."""
    labels = {"Labels": {proofs.REVISION_LABEL: f"{'f' * 40}+dirty"}}
    image = docker.Image(id=DIGEST, tags=(), digests=(), platform="linux/amd64", config=labels)
    monkeypatch.setattr(Engine, "image", lambda *_: image)
    monkeypatch.setattr(docker, "Engine", Engine)
    monkeypatch.setattr(verify, "verify", lambda *_, **__: pytest.fail("it was checked"))
    assert command.main(["verify", "--only", cell.id, "--record"]) == 61
    with pytest.raises(VerificationError, match=r"cannot be recorded: .*\+dirty"):
        record(ROOT, cell, [], Engine(), image="x:1")


def test_a_reproduction_records_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["verify", "--reproduce", "llama-cpu", "--record", "--dry-run"]) == 2
    assert "--record does not go with --reproduce llama-cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("took", "is_locked", "said"),
    [
        (None, True, None),
        (timing.Took(digest=DIGEST, seconds=9, kept=()), True, True),
        (timing.Took(digest=DIGEST, seconds=9, kept=("compile",)), True, False),
        (timing.Took(digest=DIGEST, seconds=9, kept=()), False, False),
    ],
)
def test_a_digest_is_told_as_reproducible_only_of_a_build_without_a_cache(
    cell: Cell, took: timing.Took | None, is_locked: bool, said: bool | None
) -> None:
    row = proofs.of_checks(
        cell,
        "linux/amd64",
        SAID,
        digest=DIGEST,
        commit="f" * 40,
        today=date(2026, 11, 22),
        machine="2 CPUs, no GPU",
        took=took,
        is_locked=is_locked,
    )
    assert row.digest_reproducible is said
    assert ("its digest comes of no other build" in str(row)) is (said is False)


def test_the_committed_rows_say_of_each_digest_whether_it_is_reproducible(project: Path) -> None:
    for row in proofs.load(project, matrix.load(project).cells).values():
        assert not row.digest_reproducible or (not row.kept and row.build_seconds), row.cell
