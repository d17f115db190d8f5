"""The gateway's counts for Prometheus.

They are plain numbers until the first scrape, which imports Prometheus' client library: the first token must not wait
for it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from appliance.console.progress import Phase, Progress
from appliance.engine_route import MetricAlias

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from appliance.gateway.clients.connections import Counts
    from appliance.gateway.clients.request_log import FinishedRequest
    from appliance.gateway.engine.gate import FleetDoor
    from appliance.gateway.engine.insight import Insight
    from appliance.gateway.engine.load import Load

# from a cached prompt on a GPU to a long prefill on a CPU
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# of one token: from a small model on a GPU to a large one whose weights are read from a disk
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
FAILED = "appliance.failed"
"""Key in the scope of a request whose answer began with 200 and failed later: the status to count it under."""
CLIENT_LEFT = "499"
"""Status that counts a request whose client left before the answer; nginx uses the same."""


class Histogram:
    """Counts of durations in seconds, by upper `bounds` and one bucket above them all."""

    def __init__(self, bounds: tuple[float, ...] = BUCKETS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values not above it) for each bucket."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return [(bound, float(count)) for bound, count in zip(bounds, accumulate(self._counts), strict=True)]


class TokenCounts:
    """Counts of the finished requests of one model. A figure that a request's engine did not tell is not counted."""

    def __init__(self) -> None:
        self.endings: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter(prompt=0, cached=0, from_disk=0, computed=0, generated=0)
        self.durations = {
            "time_to_first_token": Histogram(),
            "time_per_output_token": Histogram(TOKEN_BUCKETS_S),
            "request": Histogram(),
            "request_wait": Histogram(),
        }

    def add(self, row: FinishedRequest) -> None:
        self.endings[row.ending] += 1
        if row.tokens_in is not None:
            cached = row.tokens_cached or 0
            self.tokens["prompt"] += row.tokens_in
            self.tokens["cached"] += cached
            self.tokens["computed"] += max(0, row.tokens_in - cached)
            self.tokens["from_disk"] += row.tokens_from_disk or 0
        self.tokens["generated"] += row.tokens_out or 0
        self.durations["request"].observe(row.seconds)
        self.durations["request_wait"].observe(row.waited_s)
        if row.ttft_s is not None:
            self.durations["time_to_first_token"].observe(row.ttft_s)
        if row.tokens_per_s:
            self.durations["time_per_output_token"].observe(1 / row.tokens_per_s)


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
        aliases: Iterable[MetricAlias] = (),
        insights: Callable[[], Mapping[str, Insight]] = dict,
        engine_counts: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
        fleet: FleetDoor | None = None,
    ) -> None:
        """`running` returns the number of running requests, `events_per_s` the events per second of their streams.
        `engine_counts` returns what each model's engine counts of prompts on disk and of experts."""
        self._connections = connections
        self._running = running
        self._events_per_s = events_per_s
        self._progress = progress
        self._engine_restarts = engine_restarts
        self._engine_hangs = engine_hangs
        self._loads = loads
        self._aliases = tuple(dict.fromkeys(aliases))
        self._insights = insights
        self._engine_counts = engine_counts
        self._fleet = fleet
        self._models: defaultdict[str, TokenCounts] = defaultdict(TokenCounts)
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._durations: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._first_bytes: defaultdict[str, Histogram] = defaultdict(Histogram)

    def answered(self, route: str, method: str, status: str, seconds: float) -> None:
        self._requests[route, method, status] += 1
        self._durations[route].observe(seconds)

    def began_answer(self, route: str, seconds: float) -> None:
        self._first_bytes[route].observe(seconds)

    def finished(self, row: FinishedRequest) -> None:
        """Count an inference request that ended."""
        self._models[row.model].add(row)

    def text(self) -> bytes:
        # Imported here, so that the first token after a start does not wait for it. A separate registry, so that two
        # applications can live in one process.
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, then those that have a second name; Prometheus' registry calls this at a scrape."""
        own: dict[str, Metric] = {}
        for metric in self._own():
            own[metric.name] = metric
            yield metric
        for alias in self._aliases:
            if (found := own.get(alias.ours.removesuffix("_total"))) is not None:
                yield _renamed(found, alias)

    def _own(self) -> Iterable[Metric]:
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
        yield from self._of_models()
        yield from self._of_insights()
        yield from self._of_engines()
        if self._fleet is not None:
            yield from _of_fleet(self._fleet.document())
        loads = tuple(self._loads())
        each: tuple[tuple[str, str, dict[str, float | None]], ...] = (
            ("requests_waiting", "Requests without a slot of the engine", {load.model: load.waiting for load in loads}),
            ("requests_running", "Requests that the engine works on", {load.model: load.running for load in loads}),
            ("kv_cache_use", "Share of the KV cache in use, 0 to 1", {load.model: load.kv_use for load in loads}),
        )
        for name, words, values in each:
            gauge = GaugeMetricFamily(f"appliance_{name}", words, labels=["model_name"])
            for model, value in values.items():
                if value is not None:
                    gauge.add_metric([model], value)
            yield gauge

    def _of_insights(self) -> Iterable[Metric]:
        """Yield energy and losses, by model. What is unknown is left out."""
        # imported here, with the first scrape and not at the start
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        words = "Energy of the devices that compute, since the first reading"
        joules = CounterMetricFamily("appliance_joules", words, labels=["model_name"])
        losses = GaugeMetricFamily("appliance_loss", "1 for each silent loss", labels=["model_name", "kind"])
        for model, insight in self._insights().items():
            if (value := insight.joules()) is not None:
                joules.add_metric([model], value)
            for kind in dict.fromkeys(insight.losses()):
                losses.add_metric([model, kind], 1.0)
        yield joules
        yield losses

    def _of_engines(self) -> Iterable[Metric]:
        """Yield the engines' own counts, by model. An engine that does not count something has no series of it."""
        # imported here, with the first scrape and not at the start
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        told = self._engine_counts()
        for key, words in _ENGINE_COUNTS:
            kind = CounterMetricFamily if key.endswith("_total") else GaugeMetricFamily
            family = kind(f"appliance_{key.removesuffix('_total')}", words, labels=["model_name"])
            for model, counts in told.items():
                if key in counts:
                    family.add_metric([model], counts[key])
            yield family

    def _of_models(self) -> Iterable[Metric]:
        """Yield tokens and times of finished inference requests, by model."""
        # imported here, with the first scrape and not at the start
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        for key, name, words in _TOKENS:
            counter = CounterMetricFamily(f"appliance_{name}_tokens{key}", words, labels=["model_name"])
            for model, counts in self._models.items():
                counter.add_metric([model], counts.tokens[key.removeprefix("_") or name])
            yield counter
        for name, words in _TIMES:
            family = HistogramMetricFamily(f"appliance_{name}_seconds", words, labels=["model_name"])
            for model, counts in self._models.items():
                histogram = counts.durations[name]
                family.add_metric([model], buckets=histogram.buckets(), sum_value=histogram.sum_s)
            yield family
        words = "Inference requests that ended, by ending"
        endings = CounterMetricFamily("appliance_requests_finished", words, labels=["model_name", "ending"])
        for model, counts in self._models.items():
            for ending, count in counts.endings.items():
                endings.add_metric([model, ending], count)
        yield endings


def _of_fleet(fleet: Mapping[str, Any]) -> Iterable[Metric]:
    """Yield which models are loaded, what they hold, and how often they were loaded and sent away."""
    # imported here, with the first scrape and not at the start
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    label = ["model_name"]
    loaded = GaugeMetricFamily("appliance_model_loaded", "1 for a loaded model, else 0", labels=label)
    held = GaugeMetricFamily(
        "appliance_model_held_mib", "Memory that a loaded model holds, MiB", labels=["model_name", "place"]
    )
    loads = CounterMetricFamily("appliance_model_loads", "Times that a model was loaded", labels=label)
    evictions = CounterMetricFamily(
        "appliance_model_evictions", "Times that a model was unloaded for another", labels=label
    )
    seconds = CounterMetricFamily("appliance_model_load_seconds", "Time that loads of a model took", labels=label)
    for model in fleet["models"]:
        name = [model["name"]]
        loaded.add_metric(name, float(model["is_loaded"]))
        loads.add_metric(name, model["loads"])
        evictions.add_metric(name, model["evictions"])
        seconds.add_metric(name, model["load_seconds"])
        for place, mib in model["holds_mib"].items():
            held.add_metric([model["name"], place], mib)
    yield from (loaded, held, loads, evictions, seconds)
    words = "Models that requests wait for"
    yield GaugeMetricFamily("appliance_models_waited_for", words, value=len(fleet["waiting"]))


_TOKENS = (
    ("", "prompt", "Tokens of prompts, with those from the cache"),
    ("_cached", "prompt", "Tokens of prompts that were in the KV cache"),
    ("_from_disk", "prompt", "Tokens of prompts that were in the KV cache since they were read from disk"),
    ("_computed", "prompt", "Tokens of prompts that were read, without those from the cache"),
    ("", "generated", "Tokens of answers"),
)
_ENGINE_COUNTS = (
    ("prompt_disk_saves_total", "Prompts that the engine saved on disk"),
    ("prompt_disk_saved_bytes_total", "Bytes of the prompts that the engine saved on disk"),
    ("prompt_disk_loads_total", "Prompts that the engine loaded from disk"),
    ("prompt_disk_loaded_tokens_total", "Tokens of the prompts that the engine loaded from disk"),
    ("prompt_disk_loaded_bytes_total", "Bytes of the prompts that the engine loaded from disk"),
    ("prompt_disk_passed_over_total", "Files of saved prompts that the engine could not use"),
    ("prompt_disk_files", "Saved prompts of all models now"),
    ("prompt_disk_bytes", "Bytes of the saved prompts of all models now"),
    ("moe_layer_tokens_total", "Layers times tokens whose experts were placed one by one"),
    ("moe_hits_total", "Experts computed from a slot on the GPU"),
    ("moe_fetched_total", "Experts copied to the GPU for the token that used them"),
    ("moe_cpu_total", "Experts computed on the CPU"),
    ("moe_uploads_total", "Experts copied to the GPU for later tokens"),
    ("moe_copied_bytes_total", "Bytes of experts copied to the GPU"),
    ("moe_predicted_seconds_total", "Predicted time of layers of single tokens"),
    ("moe_measured_seconds_total", "Measured time of the same layers"),
    ("moe_rule", "Rule that decides: 0 cpu, 1 lru, 2 lru-1, 3 priced, 4 offload"),
)
_TIMES = (
    ("time_to_first_token", "From an inference request's arrival to its first token"),
    ("time_per_output_token", "Mean time of one token of decode, for each request"),
    ("request", "From an inference request's arrival to the end of its answer"),
    ("request_wait", "Time that an inference request waited before the engine began with it"),
)


def _renamed(metric: Metric, alias: MetricAlias) -> Metric:
    """Return the metric under its second name; series that become equal are added up."""
    # imported here, with the first scrape and not at the start
    from prometheus_client.core import Metric as AnyMetric

    ours, name = alias.ours.removesuffix("_total"), alias.name.removesuffix("_total")
    labels, values = dict(alias.labels), dict(alias.values)
    renamed = AnyMetric(name, f"{metric.documentation}; {alias.ours}", metric.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        told = tuple(
            (labels.get(label, label), values.get(value, value) if label in labels else value)
            for label, value in sample.labels.items()
        )
        key = name + sample.name.removeprefix(ours), told
        sums[key] = sums.get(key, 0.0) + sample.value
    for (full, told), value in sums.items():
        renamed.add_sample(full, dict(told), value)
    return renamed


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
