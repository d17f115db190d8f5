"""The gateway's counts for Prometheus.

They are plain numbers until the first scrape, which imports Prometheus' client library: the first token must not wait
for it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

from appliance.console.progress import Phase, Progress

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from appliance.gateway.clients.connections import Counts
    from appliance.gateway.engine.load import Load

# from a cached prompt on a GPU to a long prefill on a CPU
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
FAILED = "appliance.failed"
"""Key in the scope of a request whose answer began with 200 and failed later: the status to count it under."""
CLIENT_LEFT = "499"
"""Status that counts a request whose client left before the answer; nginx uses the same."""


class Histogram:
    """Counts of durations in seconds, by `BUCKETS_S` and one bucket above them all."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values not above it) for each bucket."""
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        return [(bound, float(count)) for bound, count in zip(bounds, accumulate(self._counts), strict=True)]


class Metrics:
    def __init__(
        self,
        *,
        connections: Counts,
        running: Callable[[], int],
        events_per_s: Callable[[], float],
        progress: Callable[[], Progress],
        engine_restarts: Callable[[], int] | None,
        engine_hangs: Callable[[], int] = lambda: 0,
        loads: Callable[[], Iterable[Load]] = tuple,
    ) -> None:
        """`running` returns the number of running requests, `events_per_s` the events per second of their streams."""
        self._connections = connections
        self._running = running
        self._events_per_s = events_per_s
        self._progress = progress
        self._engine_restarts = engine_restarts
        self._engine_hangs = engine_hangs
        self._loads = loads
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._durations: dict[str, Histogram] = {}
        self._first_bytes: dict[str, Histogram] = {}

    def answered(self, route: str, method: str, status: str, seconds: float) -> None:
        self._requests[route, method, status] += 1
        self._durations.setdefault(route, Histogram()).observe(seconds)

    def began_answer(self, route: str, seconds: float) -> None:
        self._first_bytes.setdefault(route, Histogram()).observe(seconds)

    def text(self) -> bytes:
        # Imported here, so that the first token after a start does not wait for it. A separate registry, so that two
        # applications can live in one process.
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; Prometheus' registry calls this at a scrape."""
        # imported here, with the first scrape and not at the start
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        labels = ["route", "method", "status"]
        requests = CounterMetricFamily("appliance_requests", "Requests answered", labels=labels)
        for key, count in self._requests.items():
            requests.add_metric(key, count)
        yield requests
        histograms = (
            ("request_duration", "the end of its answer", self._durations),
            ("time_to_first_byte", "the first byte of its answer's body", self._first_bytes),
        )
        for name, end, by_route in histograms:
            words = f"From the request's headers to {end}"
            family = HistogramMetricFamily(f"appliance_{name}_seconds", words, labels=["route"])
            for route, histogram in by_route.items():
                family.add_metric([route], buckets=histogram.buckets(), sum_value=histogram.sum_s)
            yield family
        yield GaugeMetricFamily("appliance_requests_in_flight", "Requests with the engine now", value=self._running())
        words = "Events of streamed answers in the last 3 s: about one a token"
        yield GaugeMetricFamily("appliance_stream_events_per_second", words, value=self._events_per_s())
        yield GaugeMetricFamily("appliance_connections", "Connections of clients", value=self._connections.open)
        for name, words, by_reason in (
            ("refused", "Connections and requests beyond what fits", self._connections.refused),
            ("closed", "Connections closed for what their clients did not do", self._connections.closed),
        ):
            counter = CounterMetricFamily(f"appliance_connections_{name}", words, labels=["reason"])
            for reason, count in by_reason.items():
                counter.add_metric([reason], count)
            yield counter
        now = self._progress().phase
        phases = GaugeMetricFamily("appliance_phase", "1 for the phase that the appliance is in", labels=["phase"])
        for phase in Phase:
            phases.add_metric([str(phase)], float(phase is now))
        yield phases
        if self._engine_restarts is not None:
            restarts = self._engine_restarts()
            yield CounterMetricFamily("appliance_engine_restarts", "Times the engine was restarted", value=restarts)
        words, hangs = "Times the engine was killed because it did not answer any more", self._engine_hangs()
        yield CounterMetricFamily("appliance_engine_hangs", words, value=hangs)
        for name, words, values in _gauges_of(tuple(self._loads())):
            gauge = GaugeMetricFamily(name, words, labels=["model_name"])
            for model, value in values.items():
                gauge.add_metric([model], value)
            yield gauge


def _gauges_of(loads: Iterable[Load]) -> Iterable[tuple[str, str, dict[str, float]]]:
    """Return (name, help text, value by model) of each load gauge. A value that is None is left out."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for load in loads:
        each: tuple[tuple[str, str, float | None], ...] = (
            (load.gauges.waiting, "Requests without a slot of the engine", load.waiting),
            (load.gauges.running, "Requests that the engine works on", load.running),
            (load.gauges.kv_use, "Share of the KV cache that running requests take, 0 to 1", load.kv_use),
        )
        for name, words, value in each:
            if value is not None:
                found.setdefault((name, words), {})[load.model] = value
    return ((*key, values) for key, values in found.items())


class Measured:
    """ASGI middleware around the whole application that counts requests. `known_paths` limits the labels, so that a
    client cannot create time series."""

    def __init__(self, app: ASGIApp, metrics: Metrics, known_paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._known_paths = known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self._known_paths else "other"
        method = scope["method"] if scope["method"] in METHODS else "other"
        began = time.perf_counter()
        status = CLIENT_LEFT
        is_waiting = True

        async def counted(message: Message) -> None:
            nonlocal status, is_waiting
            if message["type"] == "http.response.start":
                status = str(message["status"])
            elif is_waiting:
                is_waiting = False
                self._metrics.began_answer(route, time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._metrics.answered(route, method, scope.get(FAILED, status), time.perf_counter() - began)
