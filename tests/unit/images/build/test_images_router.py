"""The image of the balancer: what is installed, and what its program is asked to have."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from images import docker
from images.build import router
from images.errors import BuildError, VerificationError
from images.pins import lock

ROOT = Path(__file__).parents[4]


def test_the_image_is_named_after_the_locked_version() -> None:
    text = (ROOT / router.LOCK).read_text()
    assert f"{router.PROGRAM}=={router.version_of(text)}" in lock.parse_pins(text)
    default = f"image: ${{ROUTER_IMAGE:-{router.NAME}:{router.version_of(text)}}}\n"
    assert default in (ROOT / "compose/replicas.yaml").read_text()


def test_verify_asks_for_each_flag_that_we_give_and_for_no_other() -> None:
    files = [ROOT / "compose/replicas.yaml", *(ROOT / "compose/kubernetes").rglob("*.yaml")]
    given = {flag for path in files for flag in re.findall(r"(?m)^\s*- (--[a-z-]+)", path.read_text())}
    assert given == set(router.FLAGS)


def test_wheels_are_held_to_the_lock_and_of_the_images_platform() -> None:
    argv = router.install_argv(Path("lib"), router.Source())
    line = " ".join(argv)
    assert "env" not in argv
    for words in (
        "--require-hashes",
        "--no-deps",
        "--only-binary :all:",
        "--target lib",
        f"-requirement {router.LOCK}",
    ):
        assert words in line


def test_neither_certificates_nor_index_are_on_the_list_of_processes_of_uv() -> None:
    source = router.Source(ca_bundle=Path("/ca.pem"), index_url="https://user:secret@index.example/simple")
    argv = router.install_argv(Path("lib"), source)
    given, uv = argv[: argv.index("-m")], argv[argv.index("-m") :]
    assert given[0] == "env"
    assert "SSL_CERT_FILE=/ca.pem" in given
    assert not [word for word in uv if "secret" in word or "ca.pem" in word]


def test_what_an_installation_leaves_is_taken_away(tmp_path: Path) -> None:
    for name in ("bin/vllm-router", "vllm_router/__init__.py", ".lock"):
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    router.tidy(tmp_path / "lib")
    left = [path for path in (tmp_path / "lib").rglob("*") if path.is_file()]
    assert [(path.name, path.stat().st_mode & 0o777) for path in left] == [("__init__.py", 0o644)]


def test_the_image_is_made_of_what_is_here(tmp_path: Path) -> None:
    argv = router.buildx_argv("appliance:llama-cpu", "appliance-router:1", "abc", tmp_path.as_posix())
    assert argv[-1] == tmp_path.as_posix()  # the context: wheels alone
    assert {"io.appliance.cell=", "io.appliance.build-id=", "io.appliance.files-sha256="} <= set(argv), "it is no cell"
    assert "IMAGE=appliance:llama-cpu" in argv
    dockerfile = (ROOT / router.DOCKERFILE).read_text()
    assert "\nRUN " not in dockerfile
    assert "USER" not in dockerfile  # that of the image below, which is nobody


class Holding(docker.Engine):
    """An engine with some images; what runs in one says what `told` has, the check's words first and then the help."""

    def __init__(self, images: dict[str, docker.Image], *told: docker.Finished) -> None:
        self._images = images
        self._told = list(told)

    def image(self, reference: str) -> docker.Image | None:
        return self._images.get(reference)

    def run(self, image: str, argv: tuple[str, ...], *, entrypoint: tuple[str, ...] | None = None) -> docker.Finished:
        return self._told.pop(0)


def image(platform: str = router.PLATFORM, **labels: str) -> docker.Image:
    return docker.Image(id="sha256:1", tags=(), digests=(), config={"Labels": labels}, platform=platform)


def build(engine: docker.Engine) -> router.RouterImage:
    return router.build(ROOT, engine, image="appliance:x", tag="appliance-router:x", source=router.Source())


def test_without_an_image_to_stand_on_the_build_is_refused_with_what_makes_one() -> None:
    with pytest.raises(BuildError, match="the image to build the router on is not here: appliance:x") as caught:
        build(Holding({}))
    assert "images build --only llama-cpu" in (caught.value.hint or "")


def test_an_image_of_another_platform_than_the_locks_is_refused() -> None:
    with pytest.raises(BuildError, match="locked for linux/amd64, and appliance:x is of linux/arm64"):
        build(Holding({"appliance:x": image("linux/arm64")}))


def test_an_image_of_the_same_inputs_is_reused() -> None:
    texts = [(ROOT / path).read_text("utf-8") for path in (router.LOCK, router.DOCKERFILE)]
    identity = hashlib.sha256("\0".join(("sha256:1", *texts)).encode()).hexdigest()[:32]
    here = {"appliance:x": image(), "appliance-router:x": image(**{router.IDENTITY_LABEL: identity})}
    assert build(Holding(here)).is_reused


PINS = tuple(lock.parse_pins((ROOT / router.LOCK).read_text("utf-8")))
RIGHT = docker.Finished(code=0, lines=PINS)
HELP = docker.Finished(code=0, lines=tuple(f"  [{flag} VALUE]" for flag in router.FLAGS))


@pytest.mark.parametrize(
    ("found", "told", "fault"),
    [
        (docker.Finished(code=1, lines=(*PINS, "added: /opt/router/lib/x.py")), HELP, "added: /opt/router/lib/x.py"),
        (docker.Finished(code=0, lines=PINS[1:]), HELP, f"{PINS[0]} is not the lock's"),
        (docker.Finished(code=0, lines=(*PINS, "left==1")), HELP, "left==1 is not the lock's"),
        (RIGHT, docker.Finished(code=0, lines=HELP.lines[1:]), f"it has no flag {router.FLAGS[0]}"),
    ],
)
def test_what_is_not_as_locked_is_named(found: docker.Finished, told: docker.Finished, fault: str) -> None:
    router.verify(ROOT, Holding({}, RIGHT, HELP), "r")  # as it must be, it passes
    with pytest.raises(VerificationError) as caught:
        router.verify(ROOT, Holding({}, found, told), "r")
    assert fault in caught.value.message
