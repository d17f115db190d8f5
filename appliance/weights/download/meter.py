"""Progress of a download: bytes, rate over the last seconds, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from appliance.values import dataclass
from appliance.weights.cache.size import as_size

WINDOW_S = 10.0
EVERY_S = 0.2  # minimum interval between reports


@dataclass(frozen=True, kw_only=True)
class FetchProgress:
    """Bytes are of the whole set. `waiting_for` gives the reason while no bytes arrive."""

    file: str
    bytes_done: int
    bytes_total: int | None
    bytes_per_s: float | None = None
    seconds_left: float | None = None
    waiting_for: str | None = None

    def facts(self) -> dict[str, str | int | None]:
        """Return the figures by the names of their fields in documents, rounded."""
        return {
            "file": self.file,
            "bytes_done": self.bytes_done,
            "bytes_total": self.bytes_total,
            "bytes_per_s": round(self.bytes_per_s) if self.bytes_per_s is not None else None,
            "seconds_left": round(self.seconds_left) if self.seconds_left is not None else None,
            "waiting_for": self.waiting_for,
        }

    def describe(self) -> str:
        """Format one line: `model.gguf: 1.20 GB of 5.03 GB, 48.0 MB/s, 80 s left`."""
        of = f" of {as_size(self.bytes_total)}" if self.bytes_total is not None else ""
        words = [f"{as_size(self.bytes_done)}{of}"]
        if self.waiting_for:
            words.append(f"waiting for {self.waiting_for}")
        elif self.bytes_per_s is not None:
            words.append(f"{as_size(round(self.bytes_per_s))}/s")
            words += [f"{self.seconds_left:,.0f} s left"] if self.seconds_left is not None else []
        return f"{self.file}: {', '.join(words)}"


class Meter:
    """Counts bytes and reports to `on_progress` at most every EVERY_S, and whenever `waiting_for` changes."""

    def __init__(
        self, total: int | None, on_progress: Callable[[FetchProgress], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self._on_progress = on_progress
        self._now = now
        self._before = 0  # of finished files
        self._file, self._size = "", 0
        self._waiting_for: str | None = None
        self._samples: deque[tuple[float, int]] = deque()
        self._received = 0
        self._told = float("-inf")

    def begin(self, file: str, size: int) -> None:
        self._file, self._size = file, size
        self._waiting_for = None
        self._tell(is_news=True)

    def received(self, size: int, count: int) -> None:
        """Note that `count` bytes came over the network; `size` is the file's size now."""
        is_news = self._waiting_for is not None
        self._size, self._waiting_for = size, None
        self._received += count
        now = self._now()
        self._samples.append((now, self._received))
        while self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        self._tell(is_news=is_news)

    def waits(self, words: str, size: int | None = None) -> None:
        self._samples.clear()
        is_news = words != self._waiting_for
        self._waiting_for = words
        self._size = self._size if size is None else size
        self._tell(is_news=is_news)

    def done(self, size: int) -> None:
        self._before += size
        self._size = 0
        self._waiting_for = None
        self._tell(is_news=True)

    def progress(self) -> FetchProgress:
        done = self._before + self._size
        rate = self._rate()
        left = (self.total - done) / rate if rate and self.total is not None else None
        return FetchProgress(
            file=self._file,
            bytes_done=done,
            bytes_total=self.total,
            bytes_per_s=rate,
            seconds_left=left,
            waiting_for=self._waiting_for,
        )

    def _rate(self) -> float | None:
        if len(self._samples) < 2:
            return None
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - begin) if end > begin else None

    def _tell(self, *, is_news: bool) -> None:
        now = self._now()
        if is_news or now - self._told >= EVERY_S:
            self._told = now
            self._on_progress(self.progress())
