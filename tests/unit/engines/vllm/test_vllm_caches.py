"""What the engine compiled: a start that is cut off leaves nothing half written, and old builds go."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from appliance.engines.vllm.startup.caches import Caches, has_key, on_volume, prune, remove_since

OLD = 1000.0


def put(path: Path, text: str = "x", *, modified: float | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if modified is not None:
        os.utime(path, (modified, modified))
    return path


def build(root: Path, name: str, *, size: int = 10, modified: float = OLD) -> Path:
    put(root / name / "vllm/torch_compile_cache/k/f", "x" * size, modified=modified)
    put(root / name / "cpu-kernels-x.json")
    put(root / name / "vllm-in-use", modified=modified)
    return root / name


@pytest.fixture
def caches(tmp_path: Path) -> Caches:
    return Caches(tmp_path / "b1", "a")


def test_what_a_start_wrote_that_did_not_become_ready_is_removed(caches: Caches, tmp_path: Path) -> None:
    kept = put(tmp_path / "b1/vllm/torch_compile_cache/k0/f", modified=OLD)
    caches.begin()
    half = put(tmp_path / "b1/vllm/torch_compile_cache/k1/vllm_compile_cache.py", "{((1, 2")
    other = put(tmp_path / "b1/cpu-kernels-x.json")
    caches.end()
    assert (kept.exists(), half.exists(), other.exists()) == (True, False, True)


def test_what_was_written_before_readiness_stays(caches: Caches, tmp_path: Path) -> None:
    caches.begin()
    made = put(tmp_path / "b1/triton/x")
    caches.ready()
    caches.end()
    assert made.exists()
    assert sorted(path.name for path in (tmp_path / "b1").iterdir()) == ["triton", "vllm-in-use"]


def test_the_next_start_removes_what_a_killed_appliance_left(caches: Caches, tmp_path: Path) -> None:
    put(tmp_path / "b1/vllm-starting-gone", modified=time.time() - 60)  # nobody holds it
    half, kept = put(tmp_path / "b1/vllm/half"), put(tmp_path / "b1/vllm/whole", modified=OLD)
    caches.begin()
    assert (half.exists(), kept.exists()) == (False, True)
    (mark,) = (tmp_path / "b1").glob("vllm-starting-*")
    assert mark.name.startswith("vllm-starting-a-")
    caches.end()


def test_another_start_that_goes_on_is_left_alone(caches: Caches, tmp_path: Path) -> None:
    other = Caches(tmp_path / "b1", "b")
    other.begin()
    written = put(tmp_path / "b1/vllm/of-the-other")
    caches.begin()
    assert written.exists()
    caches.ready()
    other.ready()
    for each in (caches, other):
        each.end()
    assert written.exists()


def test_two_containers_whose_engines_have_one_name_do_not_wait_for_each_other(tmp_path: Path) -> None:
    one, other = Caches(tmp_path / "b1", "a"), Caches(tmp_path / "b1", "a")
    one.begin()
    other.begin()
    one.ready()
    other.end()
    one.end()
    assert not list((tmp_path / "b1").glob("vllm-starting-*"))


def test_beside_an_engine_that_compiles_only_what_breaks_a_start_is_removed(tmp_path: Path) -> None:
    one, other = Caches(tmp_path / "b1", "a"), Caches(tmp_path / "b1", "b")
    one.begin()
    other.begin()
    kept = put(tmp_path / "b1/triton/k/kernel.so")
    half = put(tmp_path / "b1/vllm/torch_compile_cache/key/rank_0_0/model/vllm_compile_cache.py")
    one.end()
    assert (kept.exists(), half.exists()) == (True, False)
    other.ready()
    other.end()
    assert kept.exists()


def test_a_second_life_of_the_same_command_begins_anew(caches: Caches, tmp_path: Path) -> None:
    caches.begin()
    caches.ready()
    caches.end()
    caches.begin()
    half = put(tmp_path / "b1/vllm/half")
    caches.end()
    assert not half.exists()


def test_old_builds_go_first_and_only_the_engines_own_folders(tmp_path: Path) -> None:
    oldest, older = build(tmp_path, "b0", size=100), build(tmp_path, "b1", size=100, modified=OLD + 1)
    own = build(tmp_path, "b2", size=100)
    foreign = put(tmp_path / "llama/cuda/x", "x" * 1000)
    assert prune(own, 250) == (oldest,)
    assert not (oldest / "vllm").exists()
    assert (oldest / "cpu-kernels-x.json").exists()
    assert (older / "vllm").exists()
    assert foreign.exists()
    assert prune(own, 250) == ()


def test_a_build_that_is_in_use_stays(tmp_path: Path) -> None:
    user = Caches(tmp_path / "b0", "a")
    user.begin()
    put(tmp_path / "b0/vllm/x", "x" * 1000)
    user.ready()
    own = build(tmp_path, "b1")
    assert prune(own, 10) == ()
    user.end()
    assert prune(own, 10) == (tmp_path / "b0",)


def test_of_this_build_old_keys_go_but_not_the_newest(tmp_path: Path) -> None:
    own = build(tmp_path, "b1")
    keys = own / "vllm/torch_compile_cache"
    for number in range(3):
        put(keys / f"k{number}/f", "x" * 100)
        os.utime(keys / f"k{number}", (OLD + number, OLD + number))
    os.utime(keys / "k", (OLD - 1, OLD - 1))
    assert prune(own, 250) == (keys / "k", keys / "k0")
    assert prune(own, 1) == (keys / "k1",)


def test_whole_programs_go_key_by_key_in_one_order_with_the_others(tmp_path: Path) -> None:
    own = tmp_path / "b1"
    keys = own / "vllm/torch_compile_cache"
    whole = keys / "torch_aot_compile"
    made = [whole / "a", keys / "b", whole / "c", keys / "d"]
    for age, key in enumerate(made):
        put(key / "rank_0_0/model", "x" * 100)
        os.utime(key, (OLD + age, OLD + age))
    assert on_volume(own) == (4, 400 / 2**20)
    assert prune(own, 250) == tuple(made[:2])
    assert [has_key(own, name) for name in "abcd"] == [False, False, True, True]
    assert prune(own, 0) == (made[2],)  # the newest is likely the next


def test_what_a_killed_start_left_of_a_key_is_no_key_and_goes(tmp_path: Path) -> None:
    rest = put(tmp_path / "b1/vllm/torch_compile_cache/torch_aot_compile/removed-1a2b/model").parent
    assert on_volume(tmp_path / "b1")[0] == 0
    assert not has_key(tmp_path / "b1", "removed")
    assert prune(tmp_path / "b1", 2**30) == ()
    assert not rest.exists()


def test_no_key_goes_that_another_engine_of_this_build_may_be_loading(tmp_path: Path) -> None:
    keys = tmp_path / "b1/vllm/torch_compile_cache"
    for age in range(3):
        put(keys / f"k{age}/f", "x" * 100)
        os.utime(keys / f"k{age}", (OLD + age, OLD + age))
    one, other = (Caches(tmp_path / "b1", name, limit_bytes=limit) for name, limit in (("a", 2**30), ("b", 150)))
    one.begin()
    other.begin()
    assert len(list(keys.iterdir())) == 3
    for each in (one, other):
        each.ready()
        each.end()
    other.begin()
    assert [key.name for key in keys.iterdir()] == ["k2"]
    other.ready()
    other.end()


@pytest.mark.thorough
def test_it_is_counted_while_another_process_writes_and_removes(tmp_path: Path) -> None:
    keys = tmp_path / "b1/vllm/torch_compile_cache"
    keys.mkdir(parents=True)
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            for name in ("k", "torch_aot_compile/k"):
                for number in range(20):
                    put(keys / f"{name}/rank_{number}/model")
                shutil.rmtree(keys / name)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(150):
            count, _ = on_volume(tmp_path / "b1")
            assert 0 <= count <= 2
            has_key(tmp_path / "b1", "k")
            prune(tmp_path / "b1", 2**30)
    finally:
        done.set()
        thread.join()


def test_a_volume_that_refuses_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caches = Caches(put(tmp_path / "file") / "b1", "a")
    caches.begin()
    caches.ready()
    caches.end()
    assert "compile cache cannot be cleaned up" in caplog.text


def test_nothing_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert remove_since(tmp_path, 0.0, is_shared=False) == 0
    assert prune(tmp_path, 0) == ()
