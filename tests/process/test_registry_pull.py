"""Models of a container registry through the real client: what a registry may be, and what it may do to a download."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError, DownloadError, FatalError
from appliance.settings import HubSettings
from appliance.weights.cache.download_set import Wanted
from appliance.weights.download.fetch import fetch
from appliance.weights.download.hub import resolve
from appliance.weights.download.meter import FetchProgress
from tests.fakes.hub.running import MIB, gguf_bytes
from tests.fakes.registry.running import (
    DOCKER,
    GGUF,
    MODELPACK,
    PROJECTOR,
    RAW,
    Layer,
    RunningRegistry,
    descriptor,
    entry,
    put_artifact,
    put_index,
    put_manifest,
    running_registry,
)
from tests.process.stages.fetching import begin, ended, until

DATA = gguf_bytes(6 * MIB)
SHA256 = hashlib.sha256(DATA).hexdigest()
ONE: list[Layer] = [(RAW, "Tiny-Q4_K_M.gguf", DATA)]
NAME = "team/tiny:q4"
SMALL = gguf_bytes(1000)
OTHER = gguf_bytes(1000, seed=2)
SECRET = "me:s3cret"


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    put_artifact(tmp_path / "shelf", ONE)
    return tmp_path / "shelf"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


async def wanted_of(registry: RunningRegistry, name: str = NAME, *, is_folder: bool = False, **given: Any) -> Wanted:
    return await resolve(registry.name(name), registry.settings(**given), is_folder=is_folder)


async def pull(
    registry: RunningRegistry, models: Path, name: str = NAME, *, is_folder: bool = False, **given: Any
) -> tuple[Path, ...]:
    wanted = await wanted_of(registry, name, is_folder=is_folder, **given)
    return await fetch(wanted, models, registry.settings(**given), lambda _: None)


def ggufs(models: Path) -> list[Path]:
    return list(models.rglob("*.gguf"))


def login(text: str = SECRET) -> str:
    return base64.b64encode(text.encode()).decode()


def docker_config(registry: RunningRegistry, **entry_of: str) -> str:
    return json.dumps(
        {"auths": {"other.example": {"auth": login("a:b")}, registry.host: entry_of or {"auth": login()}}}
    )


async def test_a_modelpack_lies_where_every_download_lies(shelf: Path, models: Path) -> None:
    with running_registry(shelf) as registry:
        wanted = await wanted_of(registry)
        (path,) = await pull(registry, models)
        assert await pull(registry, models) == (path,)
        assert [row["path"].split("/")[-2] for row in registry.requests()] == [
            "manifests",
            "manifests",
            "blobs",
            "manifests",
        ]
        folder = models / f"models--oci--127.0.0.1%3A{registry.host.partition(':')[2]}--team--tiny%3Aq4"
    assert path.read_bytes() == DATA
    assert path == folder / "snapshots" / wanted.revision / "Tiny-Q4_K_M.gguf"
    assert path.readlink() == Path(f"../../blobs/{SHA256}")
    assert wanted.revision == hashlib.sha256((shelf / "team/tiny/q4").read_bytes()).hexdigest()
    assert (folder / "refs/main").read_text() == wanted.revision


PARTS = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]


@pytest.mark.parametrize(
    ("layers", "kinds", "paths"),
    [
        ([(GGUF, "", SMALL)], DOCKER, ["tiny-q4.gguf"]),
        (
            [(GGUF, "model.gguf", SMALL), ("application/vnd.docker.ai.license", "LICENSE", b"MIT")],
            DOCKER,
            ["model.gguf"],
        ),
        (
            [(GGUF, "", SMALL), (PROJECTOR, "model.mmproj", OTHER), (GGUF, "", b"GGUF")],
            DOCKER,
            ["tiny-q4-00001-of-00002.gguf", "tiny-q4-00002-of-00002.gguf", "mmproj-tiny-q4.gguf"],
        ),
        ([(RAW, PARTS[1], SMALL), (RAW, PARTS[0], OTHER)], None, PARTS),
        ([(RAW, "a/b/m.gguf", SMALL), (RAW, "a/mmproj-F16.gguf", OTHER)], None, ["m.gguf", "mmproj-F16.gguf"]),
        ([(RAW, "", SMALL)], None, ["tiny-q4.gguf"]),
        ([("application/vnd.cncf.model.weight.v1.gguf", "m.gguf", SMALL)], None, ["m.gguf"]),
        (
            [(RAW, "m.gguf", SMALL), ("application/vnd.cncf.model.doc.v1.tar", "README.md", b"x")],
            None,
            ["m.gguf"],
        ),
    ],
    ids=["docker", "docker named", "docker parts", "parts", "folders", "no name", "gguf type", "other layers"],
)
async def test_files_of_each_format(
    tmp_path: Path, models: Path, layers: list[Layer], kinds: dict[str, str] | None, paths: list[str]
) -> None:
    put_artifact(tmp_path / "shelf", layers, kinds=kinds or MODELPACK)
    with running_registry(tmp_path / "shelf") as registry:
        found = await pull(registry, models)
    assert [path.name for path in found] == paths


async def test_a_folder_of_safetensors(tmp_path: Path, models: Path) -> None:
    config = "application/vnd.cncf.model.weight.config.v1.raw"
    layers = [(RAW, "model.safetensors", SMALL), (config, "config.json", b"{}"), (config, "tokenizer.json", b"{} ")]
    put_artifact(tmp_path / "shelf", layers)
    with running_registry(tmp_path / "shelf") as registry:
        found = await pull(registry, models, is_folder=True)
        with pytest.raises(ConfigError, match=r"nothing that this image serves \(a whole GGUF model\)"):
            await wanted_of(registry)
    assert [path.name for path in found] == ["config.json", "model.safetensors", "tokenizer.json"]


async def test_an_index_with_one_model(shelf: Path, models: Path) -> None:
    digest = put_artifact(shelf, ONE)
    about = entry(f"sha256:{'0' * 64}", annotations={"vnd.docker.reference.type": "attestation-manifest"})
    top = put_index(shelf, [about, entry(digest)], "team/tiny:all")
    with running_registry(shelf) as registry:
        wanted = await wanted_of(registry, "team/tiny:all")
        assert wanted.files == (await wanted_of(registry)).files
        assert f"sha256:{wanted.revision}" == top
        pinned = await wanted_of(registry, f"team/tiny@{digest}")
    assert f"sha256:{pinned.revision}" == digest
    assert pinned.folder.endswith(f"tiny%40{digest.replace(':', '%3A')}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the registry has under `name`, its knobs, and what is said of it."""

    code: int
    message: str
    hint: str = ""
    name: str = NAME
    layers: tuple[Layer, ...] = tuple(ONE)
    more: dict[str, Any] = field(default_factory=dict)
    knobs: tuple[str, ...] = ()


REALM = ("--auth", "bearer", "--realm")
BAD = {"mediaType": RAW, "digest": f"sha256:{SHA256}", "size": 1}
CASES = [
    Case(code=10, message="no such model in the registry: oci://.*/team/none:q4", hint="tag", name="team/none:q4"),
    Case(code=10, message="archives, which are not unpacked: .*weight.v1.tar", hint="one raw layer",
         layers=(("application/vnd.cncf.model.weight.v1.tar", "m.gguf", SMALL),)),
    Case(code=10, message="nothing that this image serves.*it has application/vnd.oci.image.layer", hint="ModelPack",
         layers=(("application/vnd.oci.image.layer.v1.tar+gzip", "", SMALL),)),
    Case(code=10, message="it has no layers", layers=()),
    Case(code=10, message="not one whole model: .*: it has a.gguf, b.gguf", hint="a tag of its own",
         layers=((RAW, "a.gguf", SMALL), (RAW, "b.gguf", OTHER))),
    Case(code=10, message="not one whole model: .*it has m-00001-of-00002", layers=((RAW, PARTS[0], SMALL),)),
    Case(code=10, message="not one whole model", layers=((RAW, "a/m.gguf", SMALL), (RAW, "b/m.gguf", OTHER))),
    Case(code=32, message="unsafe path: '../../etc/x.gguf'", layers=((RAW, "../../etc/x.gguf", SMALL),)),
    Case(code=32, message="cannot be parsed.*digest 'sha512:00'", more={"layers": [{**BAD, "digest": "sha512:00"}]}),
    Case(code=32, message="of -1 bytes", more={"layers": [{**BAD, "size": -1}]}),
    Case(code=32, message="cannot be parsed.*size", more={"layers": [{**BAD, "size": "1"}]}),
    Case(code=32, message="cannot be parsed", more={"layers": 5}),
    Case(code=32, message="cannot be parsed", more={"layers": [[]]}),
    Case(code=32, message="cannot be parsed.*annotations", more={"layers": [{**BAD, "annotations": {"a": 1}}]}),
    Case(code=10, message="index names 2 manifests.*team/tiny@sha256:00", hint="by its digest",
         more={"manifests": [entry(f"sha256:{'0' * 64}"), entry(f"sha256:{'1' * 64}")]}),
    Case(code=32, message="manifest is longer than 4,194,304 bytes", knobs=("--huge-manifest",)),
    Case(code=32, message="answers 403", hint="DOCKER_AUTH_CONFIG", knobs=("--fail", "manifest=403*9")),
    Case(code=32, message="answers 418", hint="registry's log", knobs=("--fail", "manifest=418*9")),
    Case(code=32, message="Tiny-Q4_K_M.gguf: .* answers 404", hint="push the model", knobs=("--fail", "blob=404*9")),
    Case(code=32, message="another hash than announced: Tiny-Q4_K_M.gguf", hint="removed", knobs=("--flip-byte", "7")),
    Case(code=32, message="another size than announced", more={"layers": [{**BAD, "size": 7}]}),
    Case(code=32, message="asks to wait 7,200 s", knobs=("--fail", "manifest=429*9", "--retry-after", "7200")),
    Case(code=32, message="no token for 127.*: 127.0.0.1 answers 401", hint="docker login",
         knobs=("--auth", "bearer", "--account", SECRET)),
    Case(code=32, message="answers with something else", hint="proxy", knobs=("--auth", "bearer", "--no-token")),
    Case(code=32, message="names no safe address for tokens: 'file:///etc/passwd'", knobs=(*REALM, "file:///etc/passwd")),
    Case(code=32, message="names no safe address for tokens", knobs=(*REALM, "http://u:p@127.0.0.1/")),
    Case(code=32, message="names no safe address for tokens", knobs=(*REALM, "http://[::1")),
    Case(code=32, message="answers 401", hint="docker login", knobs=("--auth", "basic", "--account", SECRET)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.message)
async def test_what_is_refused_is_said(tmp_path: Path, models: Path, case: Case) -> None:
    put_artifact(tmp_path / "shelf", list(case.layers), **case.more)
    descriptor(tmp_path / "shelf", RAW, DATA)
    with running_registry(tmp_path / "shelf", *case.knobs) as registry, pytest.raises(FatalError) as caught:
        await pull(registry, models, case.name)
    assert caught.value.exit_code == case.code
    assert re.search(case.message, caught.value.message, re.DOTALL), caught.value.message
    assert case.hint in str(caught.value.hint)
    assert not ggufs(models)
    assert SECRET.partition(":")[2] not in caught.value.message


@pytest.mark.parametrize("data", [b"<html>", b"[]", b"[" * 100_000, b'{"layers": [' + b"[" * 100_000, b"\xff"])
async def test_a_page_instead_of_a_manifest(tmp_path: Path, data: bytes) -> None:
    put_manifest(tmp_path / "shelf", data, NAME)
    with running_registry(tmp_path / "shelf") as registry, pytest.raises(DownloadError, match="cannot be parsed"):
        await wanted_of(registry)


async def test_a_manifest_by_digest_is_that_manifest(shelf: Path) -> None:
    digest = put_artifact(shelf, ONE)
    put_index(shelf, [entry(digest)], "team/tiny:all")
    with running_registry(shelf, "--other-manifest") as registry:
        for name in (f"team/tiny@{digest}", "team/tiny:all"):
            with pytest.raises(DownloadError, match=rf"another digest than named: .*: expected {digest}, got sha256:"):
                await wanted_of(registry, name)


async def test_a_cut_download_resumes_and_asks_for_a_token_each_time(shelf: Path, models: Path) -> None:
    knobs = ("--cut-after", str(2 * MIB), "--cuts", "2", "--auth", "bearer", "--redirect", "--fail", "cdn=403*0")
    with running_registry(shelf, *knobs) as registry:
        (path,) = await pull(registry, models)
        sent = registry.requests(host="cdn")
        tokens = [row for row in registry.requests() if row["path"] == "/token"]
    assert path.read_bytes() == DATA
    begins = [int((row["range"] or "bytes=0-")[6:-1]) for row in sent]
    assert begins == sorted(set(begins))
    assert len(begins) == 3
    assert {row["authorization"] for row in sent} == {None}
    assert len(tokens) == 4


@pytest.mark.parametrize("kind", ["bearer", "basic"])
async def test_an_account_goes_to_its_registry_only(shelf: Path, models: Path, kind: str, tmp_path: Path) -> None:
    with running_registry(shelf, "--auth", kind, "--account", SECRET, "--redirect") as registry:
        config = tmp_path / "docker/config.json"
        config.parent.mkdir()
        config.write_text(docker_config(registry, username="me", password="s3cret"))
        (path,) = await pull(registry, models, docker_configs=(tmp_path / "none/config.json", config))
        asked = [row for row in registry.requests() if row["authorization"]]
        assert {row["host"] for row in asked} == {"hub"}
        assert {row["authorization"] for row in registry.requests(host="cdn")} == {None}
        if kind == "bearer":
            with_account = {row["path"] for row in asked if row["authorization"].startswith("Basic ")}
            assert with_account == {"/token"}
    assert path.read_bytes() == DATA


async def test_an_account_does_not_go_to_another_host_of_tokens(shelf: Path) -> None:
    with running_registry(shelf) as plain:
        realm = f"http://localhost:{plain.host.partition(':')[2]}/token"
    with running_registry(shelf, "--auth", "bearer", "--realm", realm, "--account", SECRET) as registry:
        with pytest.raises(DownloadError, match=r"localhost answers 401; the account for .* is not sent to this host"):
            await wanted_of(registry, docker_auth=docker_config(registry))
        assert {row["authorization"] for row in registry.requests()} == {None}


async def test_the_token_of_the_hub_is_not_for_registries(shelf: Path) -> None:
    with running_registry(shelf) as registry:
        await resolve(registry.name(NAME), HubSettings(endpoint=registry.endpoint, token="hf_good"))
        assert {row["authorization"] for row in registry.requests()} == {None}


@pytest.mark.parametrize("text", ["s3cret", '"s3cret"', '{"auths": ["s3cret"]}', '{"auths": "s3cret"'])
async def test_a_malformed_docker_config_is_not_repeated(shelf: Path, text: str) -> None:
    with (
        running_registry(shelf, "--auth", "basic", "--account", SECRET) as registry,
        pytest.raises(ConfigError, match="is not one: variable DOCKER_AUTH_CONFIG") as caught,
    ):
        await wanted_of(registry, docker_auth=text)
    assert "s3cret" not in f"{caught.value.message} {caught.value.hint}"


async def test_a_registry_that_is_not_there(shelf: Path) -> None:
    with (
        running_registry(shelf) as registry,
        pytest.raises(DownloadError, match=r"127\.0\.0\.1 cannot be reached") as caught,
    ):
        await resolve("oci://127.0.0.1:9/m:t", registry.settings(patience_s=0.1))
    assert caught.value.exit_code == 32


async def test_offline_nothing_is_asked(shelf: Path) -> None:
    with running_registry(shelf) as registry:
        with pytest.raises(DownloadError, match="offline mode is on: oci://"):
            await wanted_of(registry, offline=True)
        assert registry.requests() == []


async def test_progress_is_that_of_every_download(shelf: Path, models: Path) -> None:
    seen: list[FetchProgress] = []
    with running_registry(shelf) as registry:
        await fetch(await wanted_of(registry), models, registry.settings(), seen.append)
    assert seen[-1].bytes_done == seen[-1].bytes_total == len(DATA)


def test_the_life_of_a_model_of_a_registry(shelf: Path, tmp_path: Path) -> None:
    """Pull, list, verify, update, remove: by the name that it was pulled by."""
    data, old = tmp_path / "data", put_artifact(shelf, ONE)
    with running_registry(shelf) as registry:
        name = registry.name(NAME)

        def run(*words: str, code: int = 0) -> str:
            found, out, err = ended(registry, data, *words)
            assert found == code, err
            return out + err

        assert "fetched and checked" in run("pull", name)
        assert "is there already" in run("pull", name.replace("oci://", "docker://"))
        assert f"{name}  6.3 MB  GGUF" in run("list")
        assert f"{name}: Tiny-Q4_K_M.gguf: sound" in run("verify", name)
        assert f"{name}: is there already" in run("update", name)
        put_artifact(shelf, [(RAW, "Other-Q4_K_M.gguf", SMALL)])
        assert f"{name}: a newer revision is available" in run("update", "--dry-run")
        assert f"{name}: fetched and checked" in run("update")
        assert "Other-Q4_K_M.gguf: sound" in run("verify", name)
        pinned = registry.name(f"team/tiny@{old}")
        put_manifest(shelf, (shelf / "team/tiny/q4").read_bytes(), "team/tiny:q5")
        put_artifact(shelf, ONE)
        run("pull", pinned)
        assert "pinned to this revision" in run("update", pinned)
        assert "removed, 6.3 MB freed" in run("rm", name)
        assert "no such model on the volume" in run("rm", name, code=10)
        assert pinned in run("list")
        assert "no such repository on the volume: oci://" in run("update", name, code=10)
        registry.log.unlink()
        assert "is there already" in run("pull", pinned, "--offline", "on")
        assert registry.requests() == []


def test_a_killed_pull_is_seen_and_goes_on(shelf: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running_registry(shelf, "--bytes-per-s", str(MIB)) as registry:
        with begin(registry, data, "pull", registry.name(NAME)) as program:
            until(lambda: any(path.stat().st_size > MIB for path in data.rglob("*.incomplete")), "a MiB")
            program.kill()
            program.wait()
        (partial,) = data.rglob("*.incomplete")
        had = partial.stat().st_size
        code, out, _ = ended(registry, data, "list")
        assert code == 0
        assert re.search(rf"{registry.name(NAME)} .*download not finished", out)
    with running_registry(shelf) as registry:
        assert ended(registry, data, "pull", registry.name(NAME))[0] == 0
        assert [row["range"] for row in registry.requests() if row["range"]] == [f"bytes={had}-"]
    assert next(data.rglob("Tiny*.gguf")).read_bytes() == DATA
