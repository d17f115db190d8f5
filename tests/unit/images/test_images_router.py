"""The image of the balancer: what is installed, and what its program is asked to have."""

from __future__ import annotations

import re
from pathlib import Path

from images import lock, router

ROOT = Path(__file__).parents[3]


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
    assert "IMAGE=appliance:llama-cpu" in argv
    dockerfile = (ROOT / router.DOCKERFILE).read_text()
    assert "\nRUN " not in dockerfile
    assert "USER" not in dockerfile  # that of the image below, which is nobody
