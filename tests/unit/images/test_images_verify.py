"""Every check passes on a sound image and fails on one planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from appliance.image_facts import EngineFacts, ImageFacts, dump_facts
from images import docker, render, verify
from images.matrix import Cell
from images.tree import Entry, Tree
from images.verify import Check, Evidence

BUILD_ID = "b" * 32
CODE = b"\xa7\r\r\n\x01\x00\x00\x00" + b"h" * 8
TIMED_CODE = b"\xa7\r\r\n\x00\x00\x00\x00" + b"t" * 8
CERTIFICATE = b"MIIBcompany"


@pytest.fixture
def sound(cell: Cell) -> Evidence:
    """Evidence of an image that is what it must be."""
    return Evidence(
        cell=cell,
        platform="linux/amd64",
        config=_config(cell),
        tree=_tree(cell),
        version=docker.Finished(code=0, lines=("appliance: 0.1.0",)),
        engine_version=docker.Finished(code=0, lines=("version: 0.5.0-dev (build 11312, commit 0c1e57098)",)),
        secrets=frozenset({CERTIFICATE, b"MIIBpublic"}),
    )


def test_a_sound_image_passes_every_check(sound: Evidence) -> None:
    assert [check for check in (check(sound) for check in verify.CHECKS) if not check.ok] == []


def test_every_check_has_a_planted_fault() -> None:
    assert {check for check, *_ in FAULTS} == set(verify.CHECKS)


def test_an_overridden_base_may_name_itself(sound: Evidence) -> None:
    labels = {**sound.labels, "io.appliance.base-override": "x", "org.opencontainers.image.base.digest": "sha256:1"}
    assert verify.check_labels(_config_with(sound, Labels=labels)).ok


Fault = Callable[[Evidence], Evidence]


def _config_with(evidence: Evidence, **values: object) -> Evidence:
    return replace(evidence, config={**evidence.config, **values})


def _label(name: str, value: str) -> Fault:
    return lambda evidence: _config_with(evidence, Labels={**evidence.labels, name: value})


def _file(path: str, **values: Any) -> Fault:
    def plant(evidence: Evidence) -> Evidence:
        evidence.tree.files[path] = _entry(path, **values)
        return evidence

    return plant


def _without(path: str) -> Fault:
    def plant(evidence: Evidence) -> Evidence:
        del evidence.tree.files[path]
        return evidence

    return plant


def _leaked(evidence: Evidence) -> Evidence:
    evidence.tree.certificates["layer 2: etc/ca.pem"] = {CERTIFICATE}
    return evidence


def _private_key(evidence: Evidence) -> Evidence:
    evidence.tree.private_keys.append("layer 1: root/id_rsa")
    return evidence


def _engine_says(line: str, code: int = 0) -> Fault:
    return lambda evidence: replace(evidence, engine_version=docker.Finished(code=code, lines=(line,)))


def _start_fails(evidence: Evidence) -> Evidence:
    return replace(evidence, version=docker.Finished(code=1, lines=("PermissionError: /data/cache",)))


ENGINE_FACTS = EngineFacts(version="0.5.0-dev", build=11312, commit="0c1e57098", flags=("--help",), kv_types=("f16",))
ENGINE_PATH = "opt/appliance/engine_facts.json"
IMAGE_PATH = "opt/appliance/image_facts.json"
LIBRARY = "opt/appliance/lib/appliance"

FAULTS: list[tuple[Callable[[Evidence], Check], Fault, str]] = [
    (verify.check_start, _start_fails, "PermissionError: /data/cache"),
    (verify.check_engine_version, _engine_says("version: 0 (build 0, commit unknown)"), "build 0, commit unknown"),
    (verify.check_engine_version, _engine_says("error while loading shared libraries", 127), "no version line"),
    (verify.check_cpu_variants, _without("opt/llama/libggml-cpu-zen4.so"), "missing: zen4"),
    (verify.check_cpu_variants, _file("opt/llama/libggml-cpu-sse42.so"), "not listed: sse42"),
    (verify.check_no_tools, _file("usr/bin/x86_64-linux-gnu-gcc-12"), "x86_64-linux-gnu-gcc-12"),
    (verify.check_no_tools, _file("usr/bin/pip3"), "usr/bin/pip3"),
    (verify.check_no_tools, _file("usr/bin/g++", kind="link"), "usr/bin/g++"),
    (verify.check_no_tools, _file("usr/lib/python3/dist-packages/pip/__init__.py"), "dist-packages/pip"),
    (verify.check_no_leftovers, _file("var/lib/apt/lists/deb_dists_InRelease"), "InRelease"),
    (verify.check_no_leftovers, _file("var/log/dpkg.log"), "dpkg.log"),
    (verify.check_no_leftovers, _file("var/cache/ldconfig/aux-cache"), "aux-cache"),
    (verify.check_setuid, _file("usr/bin/sudo", mode=0o4755), "usr/bin/sudo"),
    (verify.check_setuid, _file("usr/bin/wall", mode=0o2755), "usr/bin/wall"),
    (verify.check_no_secret_files, _leaked, "layer 2: etc/ca.pem (CA bundle)"),
    (verify.check_no_secret_files, _private_key, "root/id_rsa"),
    (verify.check_no_secret_config, lambda e: _config_with(e, Env=["HF_TOKEN=hf_x"]), "HF_TOKEN"),
    (verify.check_no_secret_config, lambda e: _config_with(e, Env=["X=http://me:pw@proxy/"]), "me:pw@"),
    (verify.check_no_secret_config, _label("note", "-----BEGIN PRIVATE KEY-----"), "PRIVATE KEY"),
    (verify.check_labels, _label("io.appliance.engine.commit", "0" * 40), "io.appliance.engine.commit: 000"),
    (verify.check_labels, _label("io.appliance.build-id", ""), "io.appliance.build-id: missing"),
    (verify.check_labels, _label("org.opencontainers.image.created", "yesterday"), "created: yesterday"),
    (verify.check_labels, _label("org.opencontainers.image.base.digest", "sha256:1"), "base.digest: sha256:1"),
    (verify.check_engine_facts, _without(ENGINE_PATH), "missing: /opt/appliance/engine_facts.json"),
    (verify.check_engine_facts, _file(ENGINE_PATH, content=b"{}"), "another schema"),
    (verify.check_engine_facts, _file(ENGINE_PATH, content=dump_facts(replace(ENGINE_FACTS, build=0)).encode()), "0"),
    (
        verify.check_engine_facts,
        _file(ENGINE_PATH, content=dump_facts(replace(ENGINE_FACTS, commit="")).encode()),
        "''",
    ),
    (
        verify.check_engine_facts,
        _file(ENGINE_PATH, content=dump_facts(replace(ENGINE_FACTS, flags=())).encode()),
        "0 fl",
    ),
    (verify.check_image_facts, _label("io.appliance.build-id", "c" * 32), "build id is not the label's"),
    (verify.check_image_facts, _file(IMAGE_PATH, content=b"\xff"), ""),
    (verify.check_volume, _file("data", kind="folder", mode=0o755), "0o755"),
    (verify.check_volume, _file("data", kind="folder", mode=0o775, uid=1000), "1000"),
    (verify.check_volume, _without("data"), "None"),
    (verify.check_volume, lambda e: _config_with(e, Volumes=None), "not a volume"),
    (verify.check_user, lambda e: _config_with(e, User=""), "root"),
    (verify.check_user, lambda e: _config_with(e, User="0:0"), "0:0"),
    (verify.check_run_line, lambda e: _config_with(e, Entrypoint=["appliance"]), "Entrypoint: ['appliance']"),
    (verify.check_run_line, lambda e: _config_with(e, Healthcheck=None), "Healthcheck: None"),
    (verify.check_run_line, lambda e: _config_with(e, StopSignal="SIGKILL"), "SIGKILL"),
    (verify.check_byte_code, _file(f"{LIBRARY}/new.py"), f"without byte code: {LIBRARY}/new.py"),
    (verify.check_byte_code, _file("usr/lib/python3.11/__pycache__/x.cpython-311.pyc", content=TIMED_CODE), "timed"),
    (verify.check_byte_code, _without(f"{LIBRARY}/__init__.py"), ""),
    (verify.check_size, _file("opt/llama/big", size_bytes=2**40), "of 330 MiB"),
]


@pytest.mark.parametrize(("check", "plant", "said"), FAULTS, ids=[f"{n}-{f[0].__name__}" for n, f in enumerate(FAULTS)])
def test_a_planted_fault_is_caught(
    sound: Evidence, check: Callable[[Evidence], Check], plant: Fault, said: str
) -> None:
    found = check(plant(sound))
    assert not found.ok
    assert said in found.detail


@pytest.mark.parametrize(
    "path", ["usr/bin/ldd", "usr/bin/python3.11", "usr/sbin/ldconfig", "usr/bin/arch", "usr/bin/make-x"]
)
def test_ordinary_programs_are_no_tools(sound: Evidence, path: str) -> None:
    assert verify.check_no_tools(_file(path)(sound)).ok


def _entry(path: str, **values: Any) -> Entry:
    plain = {"kind": "file", "mode": 0o644, "uid": 0, "gid": 0, "size_bytes": 10, "layer": 1}
    return Entry(path=path, **{**plain, **values})


def _tree(cell: Cell) -> Tree:
    image_facts = ImageFacts(
        build_id=BUILD_ID,
        cell=cell.id,
        engine="llama",
        engine_version="0.5.0-dev",
        engine_build=11312,
        engine_commit=cell.engine.commit,
    )
    base = {"usr/bin/passwd": _entry("usr/bin/passwd", mode=0o4755, layer=0)}
    ours = [
        _entry("data", kind="folder", mode=0o775),
        _entry(ENGINE_PATH, content=dump_facts(ENGINE_FACTS).encode()),
        _entry(IMAGE_PATH, content=dump_facts(image_facts).encode()),
        _entry(f"{LIBRARY}/__init__.py"),
        _entry(f"{LIBRARY}/__pycache__/__init__.cpython-311.pyc", content=CODE),
        *(_entry(f"opt/llama/libggml-cpu-{name}.so") for name in cell.cpu_variants),
    ]
    return Tree(
        files={**base, **{entry.path: entry for entry in ours}},
        base=base,
        certificates={"layer 1: etc/ssl/certs.pem": {b"MIIBpublic"}},
        base_certificates={b"MIIBpublic"},
    )


def _config(cell: Cell) -> dict[str, Any]:
    moment = {
        "io.appliance.build-id": BUILD_ID,
        "io.appliance.base-override": "none",
        "org.opencontainers.image.created": "2026-11-21T05:10:13Z",
    }
    return {
        "Labels": {**render.static_labels(cell), **moment},
        "Env": ["PATH=/usr/bin"],
        "User": "appliance",
        "Volumes": {"/data": {}},
        "Entrypoint": ["/usr/bin/tini", "--", "appliance"],
        "Cmd": ["serve"],
        "StopSignal": "SIGTERM",
        "ExposedPorts": {"11435/tcp": {}},
        "Healthcheck": {"Test": ["CMD", "appliance", "health"], "Interval": 1},
    }
