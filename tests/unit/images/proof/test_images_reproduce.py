"""Two OCI archives, made here by hand: the same, and with one planted difference."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from images import __main__ as command
from images.build import build
from images.errors import VerificationError
from images.matrix.matrix import Cell
from images.proof import reproduce
from images.proof.reproduce import Difference

EPOCH_S = 1700000000
BASE: dict[str, Any] = {"etc/os": b"debian"}
OURS: dict[str, Any] = {"opt/": None, "opt/a.so": b"machine code", "opt/b.txt": b"words"}
CONFIG = {"created": "2023-11-14T22:13:20Z", "config": {"Labels": {"version": "0.1.0"}}}


def test_the_same_layers_are_no_difference(tmp_path: Path) -> None:
    one, two = _image(tmp_path / "1", [BASE, OURS]), _image(tmp_path / "2", [BASE, OURS])
    assert build.manifest_digest(one) == build.manifest_digest(two)
    assert reproduce.compare(one, two) is None


def test_a_changed_byte_is_named_with_both_hashes(tmp_path: Path) -> None:
    found = _compare(tmp_path, [BASE, {**OURS, "opt/a.so": b"machine c0de"}])
    assert (found.layer, found.path, found.what) == (1, "opt/a.so", "content")
    assert len(found.first) == len(found.second) == 64
    assert found.first != found.second
    assert str(found) == f"layer 1: opt/a.so: content: {found.first} and {found.second}"


def test_a_timestamp_is_named_with_both_times(tmp_path: Path) -> None:
    one = _image(tmp_path / "1", [BASE, OURS])
    two = _image(tmp_path / "2", [BASE, OURS], times={"opt/b.txt": EPOCH_S + 7})
    found = reproduce.compare(one, two)
    assert found is not None
    assert (found.layer, found.path, found.what) == (1, "opt/b.txt", "mtime 1700000000 and 1700000007")


def test_a_fraction_of_a_second_is_a_difference(tmp_path: Path) -> None:
    one = _image(tmp_path / "1", [BASE, OURS], times={"opt/b.txt": EPOCH_S + 0.25})
    two = _image(tmp_path / "2", [BASE, OURS], times={"opt/b.txt": EPOCH_S + 0.5})
    found = reproduce.compare(one, two)
    assert found is not None
    assert found.path == "opt/b.txt"


@pytest.mark.parametrize(("layers", "absent"), [([BASE, {**OURS, "opt/z": b""}], 0), ([BASE, {"opt/": None}], 1)])
def test_an_added_or_lost_file_is_named(tmp_path: Path, layers: list[dict[str, Any]], absent: int) -> None:
    found = _compare(tmp_path, layers)
    assert found.what == "only in one build"
    assert found.path == ("opt/z", "opt/a.so")[absent]
    assert (found.first, found.second)[absent] == "absent"


def test_the_first_differing_layer_is_named(tmp_path: Path) -> None:
    found = _compare(tmp_path, [{"etc/os": b"Debian"}, {**OURS, "opt/a.so": b"x"}])
    assert (found.layer, found.path) == (0, "etc/os")


def test_another_mode_is_named(tmp_path: Path) -> None:
    one = _image(tmp_path / "1", [BASE, OURS])
    two = _image(tmp_path / "2", [BASE, OURS], modes={"opt/a.so": 0o755})
    found = reproduce.compare(one, two)
    assert found is not None
    assert found.what == "mode 0o644 and 0o755"


def test_another_order_is_a_difference_without_a_path(tmp_path: Path) -> None:
    found = _compare(tmp_path, [BASE, dict(reversed(OURS.items()))])
    assert (found.layer, found.path, found.what) == (1, "the whole layer", "order or compression")
    assert found.first.startswith("sha256:")


def test_one_layer_more_is_a_difference(tmp_path: Path) -> None:
    found = _compare(tmp_path, [BASE, OURS, {"x": b""}])
    assert (found.layer, found.first) == (2, "absent")


def test_the_configuration_is_compared_last(tmp_path: Path) -> None:
    config = {**CONFIG, "config": {"Labels": {"version": "0.1.1"}}}
    found = _compare(tmp_path, [BASE, OURS], config=config)
    assert str(found) == "configuration: config.Labels.version: value: '0.1.0' and '0.1.1'"


def test_what_a_manifest_says_beside_its_layers_counts(tmp_path: Path) -> None:
    found = _compare(tmp_path, [BASE, OURS], annotations={"epoch": "1"})
    assert (found.path, found.first, found.second) == ("annotations.epoch", "absent", "'1'")


def test_something_else_is_refused(tmp_path: Path) -> None:
    image = _image(tmp_path / "1", [BASE])
    other = tmp_path / "other.tar"
    for data in (b"", _tar({"index.json": b"{"}), _tar({}), _tar({"index.json": b'{"manifests": []}'})):
        other.write_bytes(data)
        with pytest.raises(VerificationError):
            reproduce.compare(image, other)


def test_every_step_or_the_named_stages_run_again(cell: Cell, tmp_path: Path) -> None:
    job = build.Job(
        cell=cell,
        base=build.BaseChoice(identity=str(cell.base.digest)),
        origin=build.Origin(epoch_s=EPOCH_S, revision=None),
        build_id="b" * 32,
        version="0.1.0",
        tag=cell.tag,
        archive=tmp_path / "o.tar",
    )
    assert "--no-cache" in reproduce.uncached_argv(job, ())
    argv = reproduce.uncached_argv(replace(job, no_cache=True), ("wheels", "runtime"))
    assert argv[-3:] == ("--no-cache-filter", "wheels,runtime", ".")
    assert "--no-cache" not in argv
    assert set(build.buildx_argv(job)) < set(argv)


def test_the_flag_repeats_the_builds_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["verify", "--reproduce", "llama-cpu", "--dry-run", "--json", "--epoch", "1700000000"]) == 0
    (argv,) = json.loads(capsys.readouterr().out)
    assert {"--no-cache", "SOURCE_DATE_EPOCH=1700000000", "images/rendered/llama-cpu/Dockerfile"} <= set(argv)
    assert command.main(["verify", "--reproduce", "llama-gpu", "--dry-run"]) == 2
    assert "no cell matches: llama-gpu" in capsys.readouterr().err


def _compare(folder: Path, layers: list[dict[str, Any]], **values: Any) -> Difference:
    found = reproduce.compare(_image(folder / "1", [BASE, OURS]), _image(folder / "2", layers, **values))
    assert found is not None
    return found


def _image(
    folder: Path,
    layers: list[dict[str, Any]],
    *,
    config: dict[str, Any] | None = None,
    times: dict[str, float] | None = None,
    modes: dict[str, int] | None = None,
    annotations: dict[str, str] | None = None,
) -> Path:
    blobs: dict[str, bytes] = {}

    def put(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    manifest: dict[str, Any] = {
        "config": put(json.dumps(config or CONFIG).encode()),
        "layers": [put(gzip.compress(_tar(layer, times or {}, modes or {}), mtime=0)) for layer in layers],
    }
    if annotations:
        manifest["annotations"] = annotations
    index = {"manifests": [put(json.dumps(manifest).encode())]}
    folder.mkdir()
    archive = folder / "o.tar"
    archive.write_bytes(_tar({**blobs, "index.json": json.dumps(index).encode()}))
    return archive


def _tar(files: dict[str, Any], times: dict[str, float] | None = None, modes: dict[str, int] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(path.rstrip("/"))
            member.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            member.mtime = (times or {}).get(path, EPOCH_S)
            member.mode = (modes or {}).get(path, 0o644)
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
    return out.getvalue()
