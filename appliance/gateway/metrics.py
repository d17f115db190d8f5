"""What the gateway counts, for Prometheus. A registry of its own, so that two applications can live in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from appliance.gateway.progress import Phase, Progress
from appliance.gateway.traffic import Traffic

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# From a cached prompt on a GPU to a long prefill on a CPU.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
CLIENT_LEFT = "499"
"""The status under which a request is counted whose client left before it was answered, as nginx does."""


class Metrics:
    def __init__(
        self, *, traffic: Traffic, progress: Callable[[], Progress], engine_restarts: Callable[[], int] | None
    ) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "appliance_requests", "Requests answered", ("route", "method", "status"), registry=self._registry
        )
        self.duration = Histogram(
            "appliance_request_duration_seconds",
            "From the request's headers to the end of its answer",
            ("route",),
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self.first_byte = Histogram(
            "appliance_time_to_first_byte_seconds",
            "From the request's headers to the first byte of its answer's body",
            ("route",),
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        in_flight = Gauge("appliance_requests_in_flight", "Requests with the engine now", registry=self._registry)
        in_flight.set_function(lambda: traffic.running)
        self._registry.register(_State(progress, engine_restarts))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _State:
    """What is asked for at the moment of a scrape."""

    def __init__(self, progress: Callable[[], Progress], engine_restarts: Callable[[], int] | None) -> None:
        self._progress = progress
        self._engine_restarts = engine_restarts

    def collect(self) -> Iterable[Metric]:
        now = self._progress().phase
        phases = GaugeMetricFamily("appliance_phase", "1 for the phase that the appliance is in", labels=["phase"])
        for phase in Phase:
            phases.add_metric([str(phase)], float(phase is now))
        yield phases
        if self._engine_restarts is not None:
            restarts = self._engine_restarts()
            yield CounterMetricFamily("appliance_engine_restarts", "Times the engine was restarted", value=restarts)


class Measured:
    """ASGI middleware around everything. `known_paths` bounds the labels: a client cannot invent time series."""

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
                self._metrics.first_byte.labels(route).observe(time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._metrics.requests.labels(route, method, status).inc()
            self._metrics.duration.labels(route).observe(time.perf_counter() - began)
