"""Fetching from a fake hub through the real client: what the network, the hub and a mirror can do to a download."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from appliance.errors import DownloadError
from appliance.reference import parse_reference
from appliance.settings import HubSettings
from appliance.weights.cache.download_set import Wanted, WantedFile
from appliance.weights.cache.hub_layout import RepoFolder
from appliance.weights.download.fetch import fetch
from appliance.weights.download.hub import offers, read_remote_header, resolve
from appliance.weights.download.listing import list_files
from appliance.weights.download.meter import FetchProgress
from appliance.weights.download.ranges import open_range, open_session
from appliance.weights.download.retry import Transient
from appliance.weights.stores.stores import lookup
from tests.fakes.hub.running import MIB, REPO, RunningHub, gguf_bytes, put, running_hub

NAME = "Tiny-Q4_K_M.gguf"
DATA = gguf_bytes(6 * MIB)
SHA256 = hashlib.sha256(DATA).hexdigest()


class Volume:
    """A folder of models, and what was said while it was filled."""

    def __init__(self, folder: Path) -> None:
        self.models = folder / "models"
        self.models.mkdir()
        self.seen: list[FetchProgress] = []
        self.notes: list[str] = []

    async def fetch(self, wanted: Wanted, hub: HubSettings) -> tuple[Path, ...]:
        return await fetch(wanted, self.models, hub, self.seen.append, self.notes.append)

    async def pull(self, hub: RunningHub, text: str = REPO) -> tuple[Path, ...]:
        return await self.fetch(await resolve(text, hub.settings()), hub.settings())

    def partial(self, key: str = SHA256) -> Path:
        return RepoFolder(root=self.models, name="models--org--Tiny-GGUF").partial(key)

    @property
    def waited_for(self) -> list[str]:
        return [progress.waiting_for for progress in self.seen if progress.waiting_for]


def refused(match: str) -> pytest.RaisesExc[DownloadError]:
    return pytest.raises(DownloadError, match=match)


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """The hub's repositories: one with one file."""
    put(tmp_path / "hub", NAME, DATA)
    return tmp_path / "hub"


async def test_a_file_lies_where_the_hubs_own_client_looks(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf) as hub:
        wanted = await resolve(REPO, hub.settings())
        (path,) = await volume.fetch(wanted, hub.settings())
        assert await volume.fetch(wanted, hub.settings()) == (path,)
        assert [row["host"] for row in hub.requests()] == ["hub", "hub", "cdn"]
    assert path.read_bytes() == DATA
    assert path.readlink() == Path(f"../../blobs/{SHA256}")
    assert path == volume.models / f"models--org--Tiny-GGUF/snapshots/{wanted.revision}/{NAME}"
    assert (volume.models / "models--org--Tiny-GGUF/refs/main").read_text() == wanted.revision
    assert (volume.models / f".locks/models--org--Tiny-GGUF/{SHA256}.lock").exists()
    assert [volume.seen[-1].bytes_done, volume.seen[-1].bytes_total] == [len(DATA)] * 2


def begins(hub: RunningHub) -> list[int]:
    """Return the first byte that each request to the CDN asks for."""
    asked = (row["range"] or "bytes=0-" for row in hub.requests(host="cdn"))
    return [int(words.removeprefix("bytes=").partition("-")[0]) for words in asked]


async def test_a_connection_that_is_cut_at_every_megabyte(volume: Volume, shelf: Path) -> None:
    """A broken connection loses only what is in the client's buffer. Nothing else is asked for twice."""
    with running_hub(shelf, "--cut-after", str(MIB)) as hub:
        (path,) = await volume.pull(hub)
        asked = [*begins(hub), len(DATA)]
    assert path.read_bytes() == DATA
    assert asked[0] == 0
    assert all(0 <= later - begin <= MIB for begin, later in pairwise(asked))
    assert any("broke" in words for words in volume.waited_for)


async def test_a_body_that_is_short_and_says_nothing_of_it(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--chunked", "--short", "1000") as hub:
        wanted = await resolve(REPO, hub.settings())
        with refused(f"the connection ended at byte {len(DATA) - 1000:,}, after \\d+ attempts"):
            await volume.fetch(wanted, hub.settings(patience_s=1.0))
    with running_hub(shelf) as hub:
        (path,) = await volume.pull(hub)
        assert hub.bytes_sent == 1000
    assert path.read_bytes() == DATA


async def test_a_large_file_comes_in_pieces(volume: Volume, shelf: Path) -> None:
    """No request asks for more than a piece: the hub's CDN does not send a file of any size at once."""
    with running_hub(shelf, "--cut-after", str(3 * MIB // 2), "--cuts", "1") as hub:
        settings = hub.settings(piece_bytes=2 * MIB)
        (path,) = await volume.fetch(await resolve(REPO, settings), settings)
        ranges = [row["range"] for row in hub.requests(host="cdn")]
        first, cut, *later = begins(hub)
    assert path.read_bytes() == DATA
    assert cut <= 3 * MIB // 2
    assert (first, later) == (0, [cut + 2 * MIB, cut + 4 * MIB])
    assert ranges == [*(f"bytes={at}-{at + 2 * MIB - 1}" for at in (first, cut, cut + 2 * MIB)), f"bytes={later[1]}-"]


async def test_pieces_of_a_server_without_ranges(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--no-ranges") as hub:
        settings = hub.settings(piece_bytes=2 * MIB)
        (path,) = await volume.fetch(await resolve(REPO, settings), settings)
        assert hub.bytes_sent == len(DATA)
    assert path.read_bytes() == DATA


async def test_a_server_without_ranges_sends_it_again(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--no-ranges", "--cut-after", str(MIB), "--cuts", "2") as hub:
        (path,) = await volume.pull(hub)
        assert hub.bytes_sent == len(DATA) + 2 * MIB
    assert path.read_bytes() == DATA


async def test_without_ranges_and_always_cut_it_ends(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--no-ranges", "--cut-after", str(MIB)) as hub:
        wanted = await resolve(REPO, hub.settings())
        with pytest.raises(DownloadError, match=f"download failed: {NAME}: .* after \\d+ attempts") as caught:
            await volume.fetch(wanted, hub.settings(patience_s=1.0))
    assert "the bytes fetched so far are kept" in str(caught.value.hint)


async def test_nothing_that_answers_is_told_from_what_breaks(shelf: Path) -> None:
    with running_hub(shelf, "--cut-after", "0") as hub:
        (file,) = (await resolve(REPO, hub.settings())).files
        dead = HubSettings(endpoint="http://127.0.0.1:1")
        with pytest.raises(Transient, match="cannot be reached") as caught:
            list_files(REPO, None, dead)
        assert caught.value.is_unreached
        for url, is_unreached in (("http://127.0.0.1:1/a.gguf", True), (file.url, False)):
            with pytest.raises(Transient) as caught:
                await _first_bytes(replace(file, url=url), hub.settings())
            assert caught.value.is_unreached is is_unreached


async def _first_bytes(file: WantedFile, hub: HubSettings) -> bytes:
    async with open_session() as session, open_range(session, file, 0, hub) as answer:
        return await answer.content.readexactly(1)


async def test_a_dead_hub_ends_it_and_a_living_one_goes_on(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf) as hub:
        wanted = await resolve(REPO, hub.settings())
    (file,) = wanted.files
    elsewhere = replace(wanted, files=(replace(file, url="http://127.0.0.1:1/a.gguf"),))
    with pytest.raises(DownloadError, match="cannot be reached: connection refused, after"):
        await volume.fetch(elsewhere, hub.settings(patience_s=0.5))
    assert not volume.partial().stat().st_size
    with running_hub(shelf) as hub:
        (path,) = await volume.pull(hub)
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("what", ["file", "cdn"])
async def test_errors_that_pass(volume: Volume, shelf: Path, what: str) -> None:
    with running_hub(shelf, "--fail", f"{what}=500*2", "--fail", "list=503*1") as hub:
        (path,) = await volume.pull(hub)
        assert [row["status"] for row in hub.requests()].count(500) == 2
    assert path.read_bytes() == DATA
    assert volume.waited_for[-1] == "an answer: 127.0.0.1 answers 500; asking again in 1 s"


@pytest.mark.parametrize("asked", ["1", "+2"])
async def test_a_server_is_left_alone_for_as_long_as_it_asks(volume: Volume, shelf: Path, asked: str) -> None:
    """Retry-After has two forms: seconds, and a date. A date has no fractions, so that one in two seconds may be in
    little more than one."""
    with running_hub(shelf, "--fail", "file=429*1", "--fail", "list=429*1", "--retry-after", asked) as hub:
        await volume.pull(hub)
        rows = hub.requests()
    waits = [later["at"] - row["at"] for row, later in pairwise(rows) if row["status"] == 429]
    assert len(waits) == 2
    assert min(waits) >= 0.99
    assert rows[0]["status"] == 429


async def test_a_server_that_asks_for_an_hour_is_not_waited_for(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--fail", "file=429*9", "--retry-after", "3600") as hub:
        with pytest.raises(DownloadError, match="answers 429, asks to wait 3,600 s"):
            await volume.pull(hub)
        assert len(hub.requests()) == 2


async def test_another_hash_than_announced(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--flip-byte", "3000000") as hub:
        with pytest.raises(DownloadError) as caught:
            await volume.pull(hub)
        assert hub.bytes_sent == len(DATA)
    wrong = bytearray(DATA)
    wrong[3000000] ^= 0xFF
    assert caught.value.exit_code == 32
    assert caught.value.message == (
        f"file has another hash than announced: {NAME}: expected sha256 {SHA256}, "
        f"got {hashlib.sha256(wrong).hexdigest()} of {len(DATA):,} bytes"
    )
    assert not volume.partial().exists()
    assert list((volume.models / "models--org--Tiny-GGUF/snapshots").iterdir()) == []


async def test_what_an_earlier_run_left_damaged_is_fetched_anew(volume: Volume, shelf: Path) -> None:
    volume.partial().parent.mkdir(parents=True)
    volume.partial().write_bytes(bytes(MIB))
    with running_hub(shelf) as hub:
        (path,) = await volume.pull(hub)
        assert [row["range"] for row in hub.requests(host="cdn")] == [f"bytes={MIB}-", None]
    assert path.read_bytes() == DATA
    assert volume.notes == [f"partial file of an earlier run is damaged, fetching it again: {NAME}"]


@pytest.mark.parametrize("left", [len(DATA) + 5, len(DATA)])
async def test_a_partial_file_that_is_too_long_or_whole(volume: Volume, shelf: Path, left: int) -> None:
    volume.partial().parent.mkdir(parents=True)
    volume.partial().write_bytes((DATA + b"more!")[:left])
    with running_hub(shelf) as hub:
        (path,) = await volume.pull(hub)
        assert hub.bytes_sent == (0 if left == len(DATA) else len(DATA))
    assert path.read_bytes() == DATA


async def test_a_blob_of_another_size_is_fetched_anew(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf) as hub:
        (path,) = await volume.pull(hub)
        path.resolve().write_bytes(DATA[:1000])
        assert await volume.pull(hub) == (path,)
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("knobs", [["--listed-size", "1"], ["--listed-sha256", "0" * 64]])
async def test_a_listing_that_is_of_another_file(volume: Volume, shelf: Path, knobs: list[str]) -> None:
    """The hub names the file again before it sends it, so that nothing of another file is fetched."""
    with running_hub(shelf, *knobs) as hub:
        with pytest.raises(DownloadError, match=f"not the one that was listed: {NAME}: expected .*, got ") as caught:
            await volume.pull(hub)
        assert hub.bytes_sent == 0
    assert "repeat the command" in str(caught.value.hint)


async def test_a_mirror_that_tells_nothing_is_caught_by_the_size(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--listed-size", "7", "--no-linked-headers") as hub, refused("another size") as caught:
        await volume.pull(hub)
    size = len(DATA)
    assert f"{NAME}: expected {size + 7:,} bytes, got {size:,}" in caught.value.message


async def test_a_listing_that_changes_between_two_calls(volume: Volume, shelf: Path) -> None:
    """The first call's commit is asked for; the hub has another file there by now, and says so."""
    with running_hub(shelf) as hub:
        wanted = await resolve(REPO, hub.settings())
        put(shelf, NAME, gguf_bytes(6 * MIB, seed=2))
        with pytest.raises(DownloadError, match=f"expected sha256 {SHA256}, got sha256"):
            await volume.fetch(wanted, hub.settings())
        (path,) = await volume.pull(hub)
    assert path.read_bytes() == gguf_bytes(6 * MIB, seed=2)


async def test_a_proxys_page_is_no_model(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--page") as hub, refused(f"expected {len(DATA):,} bytes, got 35") as caught:
        await volume.pull(hub)
    assert "perhaps a proxy's page" in str(caught.value.hint)


async def test_redirects_are_followed_to_an_end(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--redirects", "3") as hub:
        (path,) = await volume.pull(hub)
    assert path.read_bytes() == DATA


async def test_redirects_without_an_end(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--redirects", "-1") as hub, refused("more than 5 redirects"):
        await volume.pull(hub)


async def test_the_token_goes_to_the_hub_and_nowhere_else(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--gated", "--private", "--cut-after", str(2 * MIB)) as hub:
        settings = hub.settings(token="hf_good")
        (path,) = await volume.fetch(await resolve(REPO, settings), settings)
        rows = hub.requests()
    assert path.read_bytes() == DATA
    assert {row["authorization"] for row in rows if row["host"] == "hub"} == {"Bearer hf_good"}
    assert {row["authorization"] for row in rows if row["host"] == "cdn"} == {None}
    assert "hf_good" not in repr(settings)


async def test_a_signed_address_that_expired_is_asked_for_anew(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--cut-after", str(2 * MIB), "--cuts", "1", "--fail", "cdn=403*1") as hub:
        (path,) = await volume.pull(hub)
    assert path.read_bytes() == DATA


async def test_a_folder_of_small_and_large_files(volume: Volume, shelf: Path) -> None:
    """Small ones are in git, under its sha1; the first file, by which the model is found, is linked last."""
    files = {
        "config.json": b'{"model_type": "tiny"}',
        "model.safetensors": gguf_bytes(MIB, seed=3),
        "tokenizer.json": b"{}" * 1000,
        "empty.json": b"",
    }
    for name, data in files.items():
        put(shelf, name, data, repo="org/folder")
    with running_hub(shelf) as hub:
        wanted = await resolve("org/folder", hub.settings(), is_folder=True)
        paths = await volume.fetch(wanted, hub.settings())
        assert await volume.fetch(wanted, hub.settings()) == paths
        assert hub.bytes_sent == sum(map(len, files.values()))
    assert {path.name: path.read_bytes() for path in paths} == files
    assert paths[0].name == "config.json"
    assert paths[0].resolve().name == hashlib.sha1(b"blob 22\0" + files["config.json"]).hexdigest()


async def test_a_repository_whose_projector_has_its_models_name_offers_one_model(shelf: Path) -> None:
    put(shelf, "gemma-4-E4B-it-Q4_K_M.gguf", gguf_bytes(MIB), "org/Gemma-GGUF")
    put(shelf, "gemma-4-E4B-it-mmproj.gguf", gguf_bytes(MIB, seed=2), "org/Gemma-GGUF")
    with running_hub(shelf) as hub:
        (offer,) = await offers(parse_reference("org/Gemma-GGUF"), hub.settings())
    assert [file.path for file in offer.wanted.files] == ["gemma-4-E4B-it-Q4_K_M.gguf", "gemma-4-E4B-it-mmproj.gguf"]


async def test_parts_and_projector_come_together(volume: Volume, shelf: Path) -> None:
    names = [f"Q8_0/Big-Q8_0-{n:05}-of-00003.gguf" for n in (1, 2, 3)] + ["mmproj-F16.gguf"]
    for seed, name in enumerate(names):
        put(shelf, name, gguf_bytes(MIB, seed=seed + 10))
    with running_hub(shelf, "--cut-after", str(MIB // 2)) as hub:
        paths = await volume.pull(hub, f"{REPO}:Q8_0")
    assert [path.name for path in paths] == [name.rpartition("/")[2] for name in names]
    assert [path.read_bytes() for path in paths] == [gguf_bytes(MIB, seed=seed + 10) for seed in range(len(names))]
    assert [seen.bytes_done for seen in volume.seen] == sorted(seen.bytes_done for seen in volume.seen)


@pytest.mark.parametrize("knobs", [[], ["--chunked"], ["--no-ranges"]])
async def test_a_plain_address(volume: Volume, shelf: Path, knobs: list[str]) -> None:
    with running_hub(shelf, *knobs) as hub:
        url = f"{hub.cdn}/blob/{REPO}/{NAME}"
        wanted = await resolve(url, hub.settings(token="hf_good"))
        (path,) = await volume.fetch(wanted, hub.settings(token="hf_good"))
        assert await volume.fetch(wanted, hub.settings()) == (path,)
        assert lookup(parse_reference(url), [volume.models], "gguf") == (path,)
        assert {row["authorization"] for row in hub.requests()} == {None}
    assert path.name == NAME
    assert path.resolve().name == SHA256
    assert path.parents[2].name.startswith("models--url--127.0.0.1--")


async def test_a_plain_address_is_gone_on_with_and_begun_anew_when_it_changed(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--cut-after", str(2 * MIB), "--cuts", "1") as hub:
        url = f"{hub.cdn}/blob/{REPO}/{NAME}"
        wanted = await resolve(url, hub.settings())
        (path,) = await volume.fetch(wanted, hub.settings())
        assert path.read_bytes() == DATA
        put(shelf, NAME, gguf_bytes(6 * MIB, seed=2))
        (newer,) = await volume.fetch(await resolve(url, hub.settings()), hub.settings())
    assert newer.read_bytes() == gguf_bytes(6 * MIB, seed=2)
    assert newer != path


async def test_a_plain_address_with_a_hash(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf) as hub:
        url = f"{hub.cdn}/blob/{REPO}/{NAME}"
        wanted = await resolve(url, hub.settings(), sha256="0" * 64)
        with pytest.raises(DownloadError, match=f"expected sha256 {'0' * 64}, got {SHA256}"):
            await volume.fetch(wanted, hub.settings())
        (path,) = await volume.fetch(await resolve(url, hub.settings(), sha256=SHA256.upper()), hub.settings())
    assert path.resolve().name == SHA256


async def test_the_header_of_a_remote_file(tmp_path: Path, shelf: Path) -> None:
    """Only as many bytes are fetched as the header needs. The file on the disk has the whole size."""
    data = gguf_bytes(20 * MIB, seed=4)
    put(shelf, "Big-Q8_0.gguf", data)
    steps: list[int] = []

    def is_enough(_: Path, real: int) -> bool:
        steps.append(real)
        return real >= 8 * MIB

    with running_hub(shelf) as hub:
        (file,) = (await resolve(f"{REPO}:Q8_0", hub.settings())).files
        path = await read_remote_header(file, hub.settings(), tmp_path / "header", is_enough)
        assert hub.bytes_sent == 8 * MIB
        with pytest.raises(DownloadError, match=r"cannot be parsed: Big-Q8_0.gguf: 20,971,520 bytes"):
            await read_remote_header(file, hub.settings(), tmp_path / "header", lambda *_: False)
    assert steps == [4 * MIB, 8 * MIB]
    assert path.stat().st_size == len(data)
    assert path.read_bytes()[: 8 * MIB] == data[: 8 * MIB]


async def test_progress_says_rate_and_time_left(volume: Volume, shelf: Path) -> None:
    with running_hub(shelf, "--bytes-per-s", str(8 * MIB)) as hub:
        await volume.pull(hub)
    told = [progress for progress in volume.seen if progress.seconds_left is not None]
    assert told
    assert 0 < (told[-1].bytes_per_s or 0) < 80 * MIB
    left = told[len(told) // 2]
    assert left.bytes_total is not None
    assert left.seconds_left == pytest.approx((left.bytes_total - left.bytes_done) / (left.bytes_per_s or 1))
