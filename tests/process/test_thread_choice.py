"""How many threads decode beside other work: the engine's own code, compiled here, on a machine that is computed.

The machine has its own clock, so nothing depends on how busy this one is.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "images/patches/llama-thread-choice.patch"
HEADER = "src/llama-thread-choice.h"
DOORS = """
#include "llama-thread-choice.h"
extern "C" {
llama_thread_choice * made() { return new llama_thread_choice(); }
void gone(llama_thread_choice * choice) { delete choice; }
int begin(llama_thread_choice * choice, int threads, int tokens, double now, double cpu) {
    return choice->begin(threads, tokens, now, cpu);
}
void end(llama_thread_choice * choice, double now, double cpu) { choice->end(now, cpu); }
}
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def header() -> str:
    """Return the file that the patch adds."""
    _, _, added = PATCH.read_text().partition(f"+++ b/{HEADER}\n")
    lines = added.splitlines()[1:]
    assert lines
    assert all(line.startswith("+") for line in lines), "it is the last file of the patch"
    return "".join(f"{line[1:]}\n" for line in lines)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("choice")
    (folder / Path(HEADER).name).write_text(header())
    (folder / "doors.cpp").write_text(DOORS)
    made = folder / "choice.so"
    argv = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "doors.cpp", "-o", str(made)]
    subprocess.run(argv, cwd=folder, check=True, timeout=120)
    loaded = ctypes.CDLL(str(made))
    loaded.made.restype = ctypes.c_void_p
    loaded.gone.argtypes = [ctypes.c_void_p]
    loaded.begin.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_double, ctypes.c_double]
    loaded.end.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_double]
    return loaded


@dataclass
class Engine:
    """An engine that decodes. `token` returns the seconds of a token with so many threads, and the share of the CPU
    time that they could use."""

    library: ctypes.CDLL
    set_threads: int
    token: Callable[[int], tuple[float, float]]
    now: float = 100.0
    cpu: float = 0.0
    used: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choice = self.library.made()

    def decode(self, tokens: int, *, batch: int = 1) -> list[int]:
        """Return the number of threads of each token."""
        for _ in range(tokens):
            threads = self.library.begin(self.choice, self.set_threads, batch, self.now, self.cpu)
            seconds, share = self.token(threads)
            self.now += seconds
            self.cpu += seconds * share * threads
            self.library.end(self.choice, self.now, self.cpu)
            self.used.append(threads)
        return self.used[-tokens:]


def alone(threads: int) -> tuple[float, float]:
    """Decode on cores that nobody else wants: more threads are a little faster."""
    return 0.003 + 0.006 / threads, 1.0


def beside(free_cores: int, seed: int = 1) -> Callable[[int], tuple[float, float]]:
    """Decode beside work that leaves so many cores: with more threads than that, each token waits for those that have
    lost theirs, and the longer the more they are."""
    dice = random.Random(seed)

    def token(threads: int) -> tuple[float, float]:
        seconds, _ = alone(threads)
        if threads <= free_cores:
            return seconds, 1.0
        return seconds * (1 + dice.uniform(0.2, 2.0) * (1 + 0.2 * (threads - free_cores))), 0.5

    return token


@given(threads=st.integers(1, 64), noise=st.lists(st.floats(0.5, 5.0), min_size=1, max_size=9))
def test_who_has_the_cpu_to_himself_uses_the_threads_that_were_set(
    library: ctypes.CDLL, threads: int, noise: list[float]
) -> None:
    times = iter(noise * 300)
    engine = Engine(library, threads, lambda count: (alone(count)[0] * next(times), 1.0))
    assert set(engine.decode(300)) == {threads}


@pytest.mark.parametrize(("threads", "free"), [(2, 1), (4, 3), (16, 12), (16, 7), (16, 4)])
def test_beside_other_work_it_finds_the_number_that_waits_for_nobody(
    library: ctypes.CDLL, threads: int, free: int
) -> None:
    engine = Engine(library, threads, beside(free))
    assert engine.decode(8) == [threads] * 8, "first it is measured"
    assert engine.decode(8)[0] < threads, "and the next window is a trial already"
    engine.decode(600)
    began = engine.now
    assert Counter(engine.decode(400)).most_common(1)[0][0] <= free
    as_set = beside(free)
    assert engine.now - began < 0.8 * sum(as_set(threads)[0] for _ in range(400))


def test_where_fewer_are_slower_little_is_spent_on_trials(library: ctypes.CDLL) -> None:
    engine = Engine(library, 8, lambda threads: (0.05 / threads, 0.5))
    engine.decode(100)
    assert Counter(engine.decode(1000))[8] > 900


def test_when_the_other_work_ends_all_threads_are_back(library: ctypes.CDLL) -> None:
    engine = Engine(library, 16, beside(3))
    engine.decode(500)
    assert engine.used[-1] < 16
    engine.token = alone
    engine.decode(600)
    assert set(engine.decode(100)) == {16}


def test_after_a_pause_nothing_is_known_of_other_work(library: ctypes.CDLL) -> None:
    engine = Engine(library, 2, beside(1))
    assert engine.decode(100)[-1] == 1
    engine.now += 1.5
    assert engine.decode(1) == [2]


def test_a_short_pause_between_two_answers_is_none(library: ctypes.CDLL) -> None:
    engine = Engine(library, 2, beside(1))
    engine.decode(100)
    engine.now += 0.5
    assert engine.decode(1) == [1]


def test_threads_that_are_set_anew_are_used(library: ctypes.CDLL) -> None:
    engine = Engine(library, 2, beside(1))
    engine.decode(100)
    engine.set_threads = 6
    assert engine.decode(1) == [6]


def test_batches_of_different_sizes_are_not_compared(library: ctypes.CDLL) -> None:
    engine = Engine(library, 2, beside(1))
    for _ in range(50):
        engine.decode(3, batch=1)
        engine.decode(3, batch=2)
    assert set(engine.used) == {2}


def test_fewer_threads_do_not_stay_where_sizes_change_too_often_to_judge(library: ctypes.CDLL) -> None:
    engine = Engine(library, 16, beside(3))
    engine.decode(500, batch=4)
    assert engine.used[-1] < 16
    engine.token = alone
    for _ in range(100):
        engine.decode(3, batch=3)
        engine.decode(3, batch=5)
    assert set(engine.used[-300:]) == {16}


@pytest.mark.parametrize("every", [9, 12, 15, 24, 40])
def test_trials_that_another_size_cuts_are_not_repeated_at_once(library: ctypes.CDLL, every: int) -> None:
    engine = Engine(library, 16, lambda threads: (0.05 / threads, 0.5))
    for number in range(2000 // every):
        engine.decode(every, batch=2 + number % 2)
    assert engine.now - 100 < 1.1 * len(engine.used) * 0.05 / 16


@given(
    threads=st.lists(st.integers(1, 600), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1000), st.integers(1, 3)), min_size=1, max_size=300),
)
def test_whatever_the_clocks_say_the_number_is_one_that_can_be_used(
    library: ctypes.CDLL, threads: list[int], steps: list[tuple[float, float, int]]
) -> None:
    choice, now, cpu = library.made(), 0.0, 0.0
    for number, (seconds, used, batch) in enumerate(steps):
        most = threads[number * len(threads) // len(steps)]
        assert 1 <= library.begin(choice, most, batch, now, cpu) <= most
        now, cpu = now + seconds, cpu + used
        library.end(choice, now, cpu)
    library.gone(choice)
