"""What cannot be fetched, said by `appliance models` with what to do; and updates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.errors import ConfigError, DownloadError, FatalError
from appliance.settings import hub_settings, resolve_settings
from appliance.weights.pull import Place, pull, update
from tests.fakes.hub.running import MIB, REPO, RunningHub, gguf_bytes, put, running_hub
from tests.process.stages.fetching import ended

NAME = "Tiny-Q4_K_M.gguf"


@dataclass(frozen=True)
class Case:
    """A reference, the knobs of the hub and the settings that it meets, and what is said of it."""

    text: str
    code: int
    message: str
    hint: str
    knobs: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    token: str = ""

    def __str__(self) -> str:
        return " ".join((self.text, *self.knobs, *self.flags, self.token))


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    put(tmp_path / "hub", NAME, gguf_bytes(MIB))
    put(tmp_path / "hub", "Tiny-Q8_0.gguf", gguf_bytes(2 * MIB, seed=2))
    put(tmp_path / "hub", "config.json", b"{}", repo="org/Plain")
    put(tmp_path / "hub", "model.safetensors", gguf_bytes(MIB), repo="org/Plain")
    put(tmp_path / "hub", "README.md", b"words", repo="org/Words")
    return tmp_path / "hub"


def refusal(hub: RunningHub, data: Path, text: str, token: str, *knobs: str) -> FatalError:
    """Return the error of `models pull TEXT`, run in this process. `knobs` are settings as name=value, and
    `sha256=`."""
    flags = {name: value for name, _, value in (knob.partition("=") for knob in knobs)}
    sha256 = flags.pop("sha256", None)
    environment = hub.environment(HF_TOKEN=token)
    settings = resolve_settings(flags, environment)
    (data / "models").mkdir(parents=True)
    with pytest.raises(FatalError) as caught:
        pull(text, Place(models_dir=data / "models", hub=hub_settings(settings, environment)), sha256)
    return caught.value


SHOULD = [
    Case(
        "org/Tiny-GUF",
        10,
        "repository is private or does not exist at .*, without a token: org/Tiny-GUF",
        "meant org/Tiny-GGUF",
    ),
    Case("org/Tiny-GUF", 10, "repository is private or does not exist", "check its name", knobs=("--drop-search",)),
    Case(
        "nobody/else",
        10,
        "repository is private or does not exist",
        "check its name; for a private repository set HF_TOKEN",
    ),
    Case(
        f"{REPO}:Q4_K_S",
        10,
        "no such quantization in org/Tiny-GGUF: Q4_K_S\n  Q4_K_M  1.0 MB\n  Q8_0  2.1 MB",
        "perhaps you meant org/Tiny-GGUF:Q4_K_M",
    ),
    Case(f"{REPO}/Tiny-Q4_K.gguf", 10, "no such file in org/Tiny-GGUF", "meant org/Tiny-GGUF/Tiny-Q4_K_M.gguf"),
    Case(f"{REPO}@v2", 10, "no such revision of org/Tiny-GGUF: v2", "/org/Tiny-GGUF/commits/main lists them"),
    Case("org/Plain", 10, "whole GGUF model\\): org/Plain; it has weights of another format", "of GGUF files"),
    Case("org/Words", 10, "whole GGUF model\\): org/Words; it has 1 files, no weights", "repository of GGUF files"),
    Case(REPO, 10, "--sha256 is only for plain URLs", "remove --sha256", flags=(f"sha256={'0' * 64}",)),
    Case("http://127.0.0.1:1/a.gguf", 10, "not a sha256: '12'", "64 digits", flags=("sha256=12",)),
    Case("oci://ghcr.io/org/Model", 10, "'org/Model' is not a repository of a registry", "oci://host/repository:tag"),
    Case(
        REPO,
        32,
        f"download failed: {NAME}: 127.0.0.1 answers 401",
        "it is gated: accept its terms at http://127.0.0.1:\\d+/org/Tiny-GGUF, then set HF_TOKEN",
        knobs=("--gated",),
    ),
    Case(REPO, 32, "answers 403", "it is gated", knobs=("--gated",), token="hf_other"),
    Case(REPO, 10, "repository is private or does not exist at .*, without a token", "meant", knobs=("--private",)),
    Case(REPO, 32, "cannot be read: org/Tiny-GGUF: .* answers 403", "it is gated", knobs=("--fail", "list=403*1")),
    Case(REPO, 32, "cannot be listed: org/Tiny-GGUF: .* answers 418", "try again", knobs=("--fail", "list=418*1")),
    Case(REPO, 32, f"download failed: {NAME}: .* answers 404", "the file was removed", knobs=("--fail", "cdn=404*1")),
    Case(
        REPO,
        32,
        "listing of the hub cannot be parsed: .*: hash '../../x'",
        "mirror",
        knobs=("--listed-sha256", "../../x"),
    ),
    Case(REPO, 32, "asks to wait 7,200 s", "kept", knobs=("--fail", "file=429*1", "--retry-after", "7200")),
    Case(REPO, 32, "offline mode is on: org/Tiny-GGUF", "--offline off", flags=("offline=on",)),
    Case(
        REPO, 10, "setting hf_cache is not a folder: '/no' \\(flag --hf-cache\\)", "mount it", flags=("hf_cache=/no",)
    ),
    Case("repo", 10, "reference to a model is not understood: repo: it is not org/repo", "as in org/repo"),
]


@pytest.mark.parametrize("case", SHOULD, ids=str)
def test_a_refusal_says_what_and_what_to_do(tmp_path: Path, shelf: Path, case: Case) -> None:
    with running_hub(shelf, *case.knobs) as hub:
        error = refusal(hub, tmp_path / "data", case.text, case.token, *case.flags)
    assert error.exit_code == case.code
    assert re.search(case.message, error.message)
    assert re.search(case.hint, str(error.hint))
    assert not list((tmp_path / "data").rglob("*.gguf"))


@pytest.mark.parametrize("code", [2, 10])
def test_it_is_shown_with_its_code(tmp_path: Path, shelf: Path, code: int) -> None:
    with running_hub(shelf) as hub:
        words = ["org/Tiny-GUF"] if code == 10 else []
        found, _, err = ended(hub, tmp_path / "data", "pull", *words)
    assert found == code
    assert ("hint: perhaps you meant org/Tiny-GGUF" if code == 10 else "models pull needs a file name") in err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HF_ENDPOINT", "hub.local", "variable HF_ENDPOINT is not the address of a hub: 'hub.local'"),
        ("HF_TOKEN", "hf_secret with spaces", "variable HF_TOKEN is not a token"),
        ("HF_HUB_OFFLINE", "1", "offline mode is on"),
    ],
)
def test_variables_of_the_hub(tmp_path: Path, shelf: Path, name: str, value: str, message: str) -> None:
    with running_hub(shelf) as hub:
        code, out, err = ended(hub, tmp_path / "data", "pull", REPO, environment={name: value})
        assert hub.requests() == []
    assert code == (32 if name == "HF_HUB_OFFLINE" else 10)
    assert message in err
    assert "secret" not in out + err


def test_a_token_is_sent_and_never_said(tmp_path: Path, shelf: Path) -> None:
    with running_hub(shelf, "--gated", "--private") as hub:
        code, out, err = ended(hub, tmp_path / "data", "pull", REPO, "--json", environment={"HF_TOKEN": "hf_good"})
        assert code == 0, err
        code, more, worse = ended(hub, tmp_path / "data", "pull", f"{REPO}:Q8_0", environment={"HF_TOKEN": "hf_wrong"})
        assert code == 10, worse
        assert {row["authorization"] for row in hub.requests(host="cdn")} == {None}
    assert "hf_" not in out + err + more + worse
    assert "with the token of HF_TOKEN" in worse


def test_an_update_fetches_what_is_newer(tmp_path: Path, shelf: Path) -> None:
    (tmp_path / "models").mkdir()
    with running_hub(shelf) as hub:
        place = Place(models_dir=tmp_path / "models", hub=hub.settings())
        assert pull(REPO, place).describe().startswith(f"{REPO}: fetched and checked, 1.0 MB, revision ")
        assert [each.state for each in update(None, place, is_dry=False)] == ["present"]
        put(shelf, "README.md", b"words alone")
        assert [each.state for each in update(REPO, place, is_dry=False)] == ["present"]
        put(shelf, NAME, gguf_bytes(3 * MIB, seed=5))
        (dry,) = update(None, place, is_dry=True)
        assert (dry.state, dry.bytes) == ("newer", MIB)
        (done,) = update(f"{REPO}@main", place, is_dry=False)
        assert (done.state, done.bytes, done.exit_code) == ("fetched", 3 * MIB, 0)
        assert done.files[0].read_bytes() == gguf_bytes(3 * MIB, seed=5)
        assert dry.files[0].read_bytes() == gguf_bytes(MIB)  # stays until it is removed
        (shelf / REPO / NAME).unlink()
        (gone,) = update(REPO, place, is_dry=False)
        assert gone.describe().startswith(f"{REPO}: kept: its repository no longer has it, 3.1 MB, revision ")
        with pytest.raises(ConfigError, match="no such repository on the volume: org/Other"):
            update("org/Other", place, is_dry=False)
        with pytest.raises(ConfigError, match="a plain URL has no newer revision"):
            update("https://host/a.gguf", place, is_dry=False)


def test_an_update_of_a_ref_that_is_garbage(tmp_path: Path, shelf: Path) -> None:
    data = tmp_path / "data"
    with running_hub(shelf) as hub:
        ended(hub, data, "pull", REPO)
        ref = data / f"models/models--{REPO.replace('/', '--')}/refs/main"
        ref.write_bytes(b"\0\xff")
        code, _, err = ended(hub, data, "update")
        assert code == 30
        assert f"cache has no valid revision: {ref}" in err
        assert ended(hub, data, "pull", REPO)[0] == 0
        assert ended(hub, data, "update")[0] == 0


def test_an_update_of_all_goes_on_after_one_that_fails(tmp_path: Path, shelf: Path) -> None:
    data = tmp_path / "data"
    with running_hub(shelf) as hub:
        ended(hub, data, "pull", REPO)
        (data / "models/models--aaa--Gone/refs").mkdir(parents=True)
        (data / "models/models--aaa--Gone/refs/main").write_text("1" * 40)
        put(shelf, NAME, gguf_bytes(3 * MIB, seed=5))
        code, out, err = ended(hub, data, "update")
    assert code == 10
    assert out.startswith(f"aaa/Gone: update check failed\n{REPO}: fetched and checked, 3.1 MB")
    assert "aaa/Gone: repository is private or does not exist" in err


def test_offline_what_is_there_is_named(tmp_path: Path, shelf: Path) -> None:
    (tmp_path / "models").mkdir()
    with running_hub(shelf) as hub:
        fetched = pull(REPO, Place(models_dir=tmp_path / "models", hub=hub.settings()))
        asked = len(hub.requests())
        place = Place(models_dir=tmp_path / "models", hub=hub.settings(offline=True))
        found = pull(REPO, place)
        assert (found.state, found.files, found.revision) == ("present", fetched.files, fetched.revision)
        with pytest.raises(DownloadError, match="offline mode is on"):
            pull(f"{REPO}:Q8_0", place)
        with pytest.raises(DownloadError, match="offline mode is on: all models"):
            update(None, place, is_dry=False)
        assert len(hub.requests()) == asked
