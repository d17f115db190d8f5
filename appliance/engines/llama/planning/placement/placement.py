"""Placement of layers on GPUs and CPU: the fastest that fits, found exactly, for one context and one KV cache type.

The engine gives each GPU a contiguous run of layers, the CPU the first ones, the last GPU the output. Decode visits
devices one after another, so the time of a job is a sum over layers. Dynamic programming finds the best runs:
best[j] = min over i of best[i] + time of layers i..j on the next device. A run may be empty, so every subset of the
cards is a candidate, and a slow card is left out if that is faster. A split by memory x bandwidth is preferred if it
is as fast within noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace

from appliance.engines.llama.planning.hardware.rates import CpuRates
from appliance.engines.llama.planning.memory.attachments import projector_mib
from appliance.engines.llama.planning.memory.memory import (
    MIB,
    SCHED_COPIES,
    compute_mib,
    flash_copy_bytes,
    layer_kv_bytes,
    layers_of,
    mask_bytes,
    output_mib,
    padded,
    weights_mib,
)
from appliance.engines.llama.planning.placement.roofline import DEPTH, HOP, Cost, Roofline
from appliance.model import Layer, Model
from appliance.plan import Costs, Device, GpuAllocation, Memory, Placement, Speed
from appliance.values import dataclass

EVEN_FOR = 0.03  # share of the time that an even split may cost: measuring could not tell it from chance
# Job time in picoseconds, longer than any job, and how full the fullest card is, which decides between equal times.
_NEVER = (1 << 80, 0.0)


@dataclass(frozen=True, kw_only=True)
class PlacementJob:
    """One model at one context length, to be placed on a machine."""

    model: Model
    context: int
    kv_type: str
    ubatch: int
    parallel: int
    projector_on_host: bool = False
    gpu_layers: int | None = None  # --gpu-layers; None: not set
    cpu_expert_layers: int | None = None  # --n-cpu-moe; None: not set
    has_flash: bool = True  # False if GPUs have no flash attention kernel for the model's heads


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of the machine that a job is placed on."""

    devices: tuple[Device, ...]
    spare_mib: float  # host memory for weights, caches and buffers; other needs are already taken off
    dram_gb_s: float  # bandwidth that kernels reach
    memory_gb_s: float = 0.0  # bandwidth of the memory itself, measured or assumed
    dram_is_measured: bool = True
    is_pinned: bool = False  # True if host weights may be pinned, so they are copied to a GPU at that rate
    cpu: CpuRates | None = None
    tables: dict[tuple[object, ...], _Table] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Placed:
    placement: Placement
    host: Memory
    speed: Speed
    cost: int  # picoseconds of the chat job in the fastest split; `placement` may be slower by EVEN_FOR


def place(job: PlacementJob, resources: Resources) -> Placed | None:
    """Return the fastest placement that fits; None if none does. More memory or one more GPU never makes it slower."""
    last = _last_expert_layer(job.model)
    sizes = _sizes_of(job)
    found: list[Placed] = []
    for devices, is_pipeline in _teams(resources.devices):
        table = _table(job, resources, devices)
        choices = _expert_choices(sizes, resources, devices, is_pipeline, last, table)
        of_team = [_Search(sizes, resources, devices, n, is_pipeline, table, may_use_cpu=False).best() for n in choices]
        # If GPUs hold everything and are clearly faster, layers on the CPU cannot help, and that search takes longest.
        if not (any(of_team) and table.gpus_pay):
            # Experts leave the GPUs before whole layers do: they are most of the bytes, and a token reads few of them.
            away = last if job.cpu_expert_layers is None else choices[-1]
            of_team.append(_Search(sizes, resources, devices, away, is_pipeline, table, may_use_cpu=True).best())
        found += [placed for placed in of_team if placed]
        if len(devices) == 1 and found and is_unbeatable(found[0].placement, resources.devices):
            return found[0]
    # Without a GPU --gpu-layers and --n-cpu-moe have no effect.
    if not resources.devices or (job.gpu_layers in (None, 0) and job.cpu_expert_layers in (None, 0)):
        on_cpu = _Search(sizes, resources, (), 0, False, _table(job, resources, ()), may_use_cpu=True).best()
        found += [on_cpu] if on_cpu else []
    return min(found, key=lambda placed: placed.cost, default=None)


def is_unbeatable(placement: Placement, devices: tuple[Device, ...]) -> bool:
    """Return True if everything lies on the fastest card, so that no other placement needs to be tried."""
    return placement.is_whole and [share.gpu.id for share in placement.shares] == [devices[0].id]


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Costs of each layer, and of the output after the last layer."""

    cpu: tuple[Cost, ...]
    gpus: tuple[tuple[Cost, ...], ...]  # for each GPU
    apart: tuple[tuple[Cost, ...], ...]  # for each GPU, with the layer's experts on the CPU
    gpus_pay: bool  # True if every layer takes at most half the CPU's time on any GPU


def _table(job: PlacementJob, resources: Resources, devices: tuple[Device, ...]) -> _Table:
    """Return the layers' costs on these devices. They do not depend on the context, so a start computes them once."""
    # The model is keyed by identity: a start plans one model, and a hash by value would walk all its layers each time.
    key = (id(job.model), job.kv_type, job.ubatch, tuple(device.id for device in devices))
    if key not in resources.tables:
        upload = upload_of(devices[0], is_pinned=resources.is_pinned) if devices else None
        roofline = replace(roofline_of(job, resources, upload), depth=DEPTH)
        resources.tables[key] = _job_costs(roofline, layers_of(job.model), devices)
    return resources.tables[key]


def roofline_of(job: PlacementJob, resources: Resources, upload: Device | None) -> Roofline:
    """Return the roofline of a job. `upload` is the GPU that host weights are copied to; None: there is none."""
    return Roofline(
        model=job.model,
        kv_type=job.kv_type,
        ubatch=job.ubatch,
        dram_gb_s=resources.dram_gb_s,
        cpu=resources.cpu,
        upload=upload,
    )


def upload_of(device: Device, *, is_pinned: bool) -> Device:
    """Return the GPU with the rate at which host weights are copied to it: pinned or pageable memory."""
    return replace(device, upload_gb_s=max(device.upload_gb_s, device.pinned_gb_s)) if is_pinned else device


def _job_costs(roofline: Roofline, layers: tuple[Layer, ...], devices: tuple[Device, ...]) -> _Table:
    def row(on: Callable[[Layer], Costs], output: Costs) -> tuple[Cost, ...]:
        known: dict[Layer, Cost] = {}  # most layers of a model are alike
        for layer in layers:
            if layer not in known:
                known[layer] = Cost() if layer.is_draft else roofline.job(on(layer))
        return (*(known[layer] for layer in layers), roofline.job(output))

    def on_each(on: Callable[[Layer, Device], Costs]) -> tuple[tuple[Cost, ...], ...]:
        def on_card(device: Device) -> tuple[Cost, ...]:
            return row(lambda layer: on(layer, device), roofline.output_on_gpu(device))

        return tuple(map(on_card, devices))

    cpu, gpus = row(roofline.on_cpu, roofline.output_on_cpu()), on_each(roofline.on_gpu)
    apart = on_each(roofline.experts_on_cpu) if roofline.model.experts else gpus
    pairs = (pair for on_gpu in gpus for pair in zip(on_gpu[:-1], cpu[:-1], strict=True))
    pay = all(2 * gpu.job <= on_cpu.job for gpu, on_cpu in pairs)
    return _Table(cpu=cpu, gpus=gpus, apart=apart, gpus_pay=pay)


def _teams(devices: tuple[Device, ...]) -> Iterator[tuple[tuple[Device, ...], bool]]:
    """Yield the teams of devices to search, each with True if it is a pipeline, which keeps inputs several times.

    Teams are each device alone, and each device with all that follow. The first device of a team is always used, the
    others may be left empty. Weights on the host are copied to the first device, so each device with a faster link
    than the fastest card leads one team with all others.

    Slices of a GPU work alone, because a CUDA process sees one (NVIDIA's MIG user guide, "CUDA Device Enumeration"). A
    team whose first device is no better than the one before it is skipped: the team of that one includes it. For eight
    equal cards two teams are searched, one card alone and all.
    """
    for at, device in enumerate(devices):
        if not any(_is_as_good(other, device) for other in devices[:at]):
            yield (device,), False
    whole = tuple(device for device in devices if not device.is_slice)
    for at in range(len(whole) - 1):
        if not (at and _is_as_good(whole[at - 1], whole[at])):
            yield whole[at:], True
    for device in whole[1:]:
        if device.upload_gb_s > whole[0].upload_gb_s:
            yield (device, *(other for other in whole if other is not device)), True


def _is_as_good(device: Device, other: Device) -> bool:
    """Return True if `device` is at least as good as `other` in every figure that placements depend on.

    If a figure is unknown for one of them, only equal devices count as good.
    """
    if (device.is_unified, device.is_slice) != (other.is_unified, other.is_slice):
        return False
    return _figures(device) == _figures(other) or (
        None not in (device.tflops, device.tflops_16, other.tflops, other.tflops_16)
        and all(mine >= its for mine, its in zip(_figures(device), _figures(other), strict=True))
    )


def _figures(device: Device) -> tuple[float, ...]:
    """Return the figures that placements depend on; larger is better."""
    return (
        device.free_mib,
        device.bandwidth_gb_s,
        device.upload_gb_s,
        device.pinned_gb_s,
        -device.layer_us,
        device.tflops or 0.0,
        device.tflops_16 or 0.0,
    )


def _expert_choices(
    sizes: _Sizes, resources: Resources, devices: tuple[Device, ...], is_pipeline: bool, last: int, table: _Table
) -> tuple[int, ...]:
    """Return the numbers of layers to try whose experts stay in host memory.

    They are the fewest with which the rest fits; the fewest without the slower cards, which then are not needed; and
    all layers, unless every GPU is clearly faster than the CPU. --n-cpu-moe gives the only number if it is set.
    """
    asked = sizes.job.cpu_expert_layers
    if asked is not None:
        return (min(asked, last),)

    def fewest(of: tuple[Device, ...]) -> int:
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if _Search(sizes, resources, of, middle, is_pipeline, table, may_use_cpu=False).is_possible():
                high = middle
            else:
                low = middle + 1
        return high

    counts = [fewest(devices)]
    if len(devices) == len(resources.devices):  # for the other teams too it would take seconds with eight cards
        slower = (at for at in range(1, len(devices)) if devices[at].bandwidth_gb_s < devices[at - 1].bandwidth_gb_s)
        counts += [fewest(devices[:at]) for at in slower]
    return tuple(dict.fromkeys(counts if table.gpus_pay else (*counts, last)))


def _last_expert_layer(model: Model) -> int:
    with_experts = [at for at, layer in enumerate(layers_of(model)) if layer.expert_bytes and not layer.is_draft]
    return with_experts[-1] + 1 if with_experts else 0


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Sizes of a job that all its searches share, MiB. Sums over the first j positions are at index j."""

    job: PlacementJob
    layers: tuple[Layer, ...]
    ubatch: int
    kv: tuple[float, ...]
    state: tuple[float, ...]
    widest_dense: tuple[float, ...]  # bytes of half the dense weights of the largest of the first j layers
    widest_kv: tuple[float, ...]  # KV cache of the largest of the first j layers
    mask: float
    compute: float  # compute buffer of a device
    logits: float
    flash: float  # f16 copies of the largest layer's K and V on a GPU; nearly every run of layers has such a layer
    projector: float  # if it lies on a GPU
    host_projector: float  # if it lies in host memory


def _sizes_of(job: PlacementJob) -> _Sizes:
    layers = layers_of(job.model)
    loaded = [None if layer.is_draft else layer for layer in layers]  # --gpu-layers counts draft layers too
    cells_of = (job.kv_type, job.context, job.ubatch, job.parallel)
    kv = _added(layer_kv_bytes(layer, *cells_of) / MIB if layer else 0.0 for layer in loaded)
    state = _added(layer.state_bytes * job.parallel / MIB if layer else 0.0 for layer in loaded)
    dense = itertools.accumulate((layer.dense_bytes / 2 for layer in layers), max, initial=0.0)
    caches = itertools.accumulate((after - before for before, after in itertools.pairwise(kv)), max)
    ubatch = min(job.ubatch, padded(job.context))
    of_batch = (ubatch, job.context, job.parallel)
    flash = max(flash_copy_bytes(layer, *cells_of) for layer in layers) / MIB if job.has_flash else 0.0
    return _Sizes(
        job=job,
        layers=layers,
        ubatch=ubatch,
        kv=kv,
        state=state,
        widest_dense=(*dense, 0.0),
        widest_kv=(0.0, *caches),
        mask=mask_bytes(job.model, *of_batch, has_flash=job.has_flash) / MIB,
        compute=compute_mib(job.model, *of_batch, has_flash=job.has_flash),
        logits=output_mib(job.model, job.parallel),
        flash=flash,
        projector=projector_mib(job.model.projector, on_gpu=True),
        host_projector=projector_mib(job.model.projector, on_gpu=False),
    )


def _added(sizes: Iterable[float]) -> tuple[float, ...]:
    """Return the running sums of the layers' sizes. The output, the last position, adds nothing."""
    return tuple(itertools.accumulate((*sizes, 0.0), initial=0.0))


class _Search:
    """Search of the best placement on one team of devices, with a fixed number of layers' experts on the CPU.

    Layers are positions 0..n-1, the output is position n. Sums over the first j positions are at index j.
    """

    def __init__(
        self,
        sizes: _Sizes,
        resources: Resources,
        devices: tuple[Device, ...],
        experts_on_cpu: int,
        is_pipeline: bool,
        table: _Table,
        *,
        may_use_cpu: bool,
    ) -> None:
        self._job = sizes.job
        self._sizes = sizes
        self._resources = resources
        self._devices = devices
        self._experts_on_cpu = experts_on_cpu
        self._table = table
        self._layers = sizes.layers
        self._count = len(self._layers) + 1
        self._weights, self._expert_mib = self._weights_by_position()
        self._held = [w + k + s for w, k, s in zip(self._weights, sizes.kv, sizes.state, strict=True)]
        copies = SCHED_COPIES if is_pipeline and not experts_on_cpu else 1
        self._buffer_mib = sizes.compute + (copies - 1) * sizes.mask
        is_on_gpu = bool(devices) and not self._job.projector_on_host
        self._projector_mib = sizes.projector if is_on_gpu else 0.0
        self._host_projector_mib = 0.0 if is_on_gpu else sizes.host_projector
        # Memory of a run besides its layers, by its first position: on the first device, and on the others. The output
        # alone has no attention, so it needs no copies of K and V.
        first = sizes.flash + self._projector_mib
        self._beside = ([size + first for size in self._copies()], [*[sizes.flash] * (self._count - 1), 0.0, 0.0])
        self._first_free = self._least_on_cpu(may_use_cpu)

    def _least_on_cpu(self, may_use_cpu: bool) -> range:
        """Return the range of the number of first positions that may lie on the CPU."""
        asked = self._job.gpu_layers
        if asked is not None and self._devices:
            fixed = max(0, self._count - asked)
            return range(fixed, fixed + 1)
        if not self._devices:
            return range(self._count, self._count + 1)
        return range(self._count if may_use_cpu else 1)

    def _weights_by_position(self) -> tuple[list[float], float]:
        """Return the running sums of weights without experts on the CPU, and the size of those experts, both in MiB."""
        weights, experts = [0.0], 0.0
        for at, layer in enumerate(self._layers):
            is_loaded = not layer.is_draft  # --gpu-layers counts a draft layer, but it is not loaded
            away = layer.expert_bytes if at < self._experts_on_cpu and is_loaded else 0
            experts += away / MIB
            size = (layer.dense_bytes + layer.expert_bytes - away) / MIB if is_loaded else 0.0
            weights.append(weights[-1] + size)
        weights.append(weights[-1] + self._job.model.output_bytes / MIB)
        return weights, experts

    def _copies(self) -> list[float]:
        """Return the MiB that the first device needs for copies of host weights, by the number of layers on the CPU.

        For a batch, two matrices at a time are copied to it, of experts or of a layer on the CPU. K and V of such a
        layer are copied too, because its attention runs there for 32 tokens or more (ggml-backend.cpp,
        ggml_backend_sched_split_graph: "expand gpu up").
        """
        # Two of an expert's three matrices (gate, up, down) are there at a time.
        experts = 2 / 3 * max((layer.expert_bytes for layer in self._layers[: self._experts_on_cpu]), default=0)
        widest = zip(self._sizes.widest_dense, self._sizes.widest_kv, strict=True)
        return [max(experts, dense) / MIB + cache for dense, cache in widest]

    def is_possible(self) -> bool:
        """Return True if the host can hold the experts that stay there, and the GPUs the rest, at any speed."""
        return self._host(0).total <= self._resources.spare_mib and self._fills(0) == self._count

    def _fills(self, start: int) -> int:
        """Return the position that the devices reach from `start` if each is filled as far as possible."""
        reached = start
        for at in range(len(self._devices)):
            ends = range(self._count, reached, -1)
            farthest = next((j for j in ends if self._need_mib(at, reached, j) <= self._room(at, reached)), reached)
            if at == 0 and farthest == start:
                return start
            reached = farthest
        return reached

    def _room(self, at: int, start: int) -> float:
        device = self._devices[at]
        if not device.is_unified:
            return device.free_mib
        cpu_layers = start if at == 0 else 0
        return min(device.free_mib, self._resources.spare_mib - device.held_back_mib - self._host(cpu_layers).total)

    def _need_mib(self, at: int, start: int, end: int) -> float:
        return self._held[end] - self._held[start] + self._compute_mib(at, start, end)

    def _compute_mib(self, at: int, start: int, end: int) -> float:
        size = self._buffer_mib + (self._sizes.logits if end == self._count else 0.0)
        return size + self._beside[at > 0][start]

    def _need(self, at: int, start: int, end: int) -> Memory:
        return Memory(
            weights=self._weights[end] - self._weights[start],
            kv=self._sizes.kv[end] - self._sizes.kv[start],
            state=self._sizes.state[end] - self._sizes.state[start],
            compute=self._compute_mib(at, start, end) - (0.0 if at else self._projector_mib),
            output=0.0,
            cache=0.0,
            overhead=0.0 if at else self._projector_mib,
        )

    def _host(self, cpu_layers: int) -> Memory:
        """Return the host memory: the embedding, the first `cpu_layers` layers, and the experts that stay there."""
        model = self._job.model
        all_of_it = cpu_layers == self._count
        weights = (
            weights_mib(model) if all_of_it else (self._outside_mib() + self._weights[cpu_layers] + self._expert_mib)
        )
        inputs = 8 * self._sizes.ubatch * model.embedding_length / MIB + self._sizes.mask
        return Memory(
            weights=weights,
            kv=self._sizes.kv[cpu_layers],
            state=self._sizes.state[cpu_layers],
            compute=self._sizes.compute if cpu_layers else inputs,
            output=self._sizes.logits,
            cache=0.0,
            overhead=self._host_projector_mib,
        )

    def _outside_mib(self) -> float:
        """Return the MiB of weights that are looked up by row, as the token embedding: they stay in host memory."""
        return self._job.model.embedding_bytes / MIB

    def best(self) -> Placed | None:
        costs = [_sums(self._table.cpu), *(_sums(self._row(at)) for at in range(len(self._devices)))]
        best: list[tuple[int, float]] = [_NEVER] * (self._count + 1)
        came: list[tuple[int, ...]] = [()] * (self._count + 1)
        for j in self._first_free:
            if j <= self._count and self._host(j).total <= self._resources.spare_mib:
                best[j], came[j] = (costs[0][j], 0.0), (j,)
        for at in range(len(self._devices)):
            best, came = self._next(at, costs[at + 1], best, came)
        if best[self._count] == _NEVER:
            return None
        ends, cost = came[self._count], best[self._count][0]
        return self._placed(self._evened(ends, cost, costs), cost)

    def _evened(self, ends: tuple[int, ...], cost: int, costs: list[list[int]]) -> tuple[int, ...]:
        """Return the ends of a split by memory x bandwidth over the same cards; `ends` if that costs too much.

        It has to fit, and to cost at most EVEN_FOR. A card that is filled completely has no room for needs that the
        plan did not foresee.
        """
        used = [at for at, (start, end) in enumerate(itertools.pairwise(ends)) if end > start]
        if len(used) < 2:
            return ends
        weights = {at: self._devices[at].free_mib * self._devices[at].bandwidth_gb_s for at in used}
        held = self._held
        even, reached = [ends[0]], 0.0
        for at in range(len(self._devices)):
            reached += weights.get(at, 0.0)
            request = held[ends[0]] + (held[-1] - held[ends[0]]) * reached / sum(weights.values())
            even.append(min(range(even[-1], self._count + 1), key=lambda j: abs(held[j] - request)))
        runs = list(itertools.pairwise(even))
        fits = all(self._need_mib(at, *run) <= self._room(at, run[0]) for at, run in enumerate(runs) if run[1] > run[0])
        time = costs[0][even[0]] + sum(costs[at + 1][run[1]] - costs[at + 1][run[0]] for at, run in enumerate(runs))
        time += HOP.job * sum(start > 0 for start, end in runs if end > start)
        is_whole = even[-1] == self._count and all(runs[at][1] > runs[at][0] for at in used)
        return tuple(even) if is_whole and fits and time <= cost * (1 + EVEN_FOR) else ends

    def _next(
        self, at: int, cost: list[int], best: list[tuple[int, float]], came: list[tuple[int, ...]]
    ) -> tuple[list[tuple[int, float]], list[tuple[int, ...]]]:
        """Return `best` and `came` with one more device: for each j its best run i..j, or an empty run."""
        is_last = at == len(self._devices) - 1
        is_needed = at == 0  # the first of a team must be used: plans without it belong to another team
        chosen = [_NEVER] * len(best) if is_needed else list(best)
        ends = [() if is_needed or not row else (*row, row[-1]) for row in came]
        held, rooms = self._held, [self._room(at, i) for i in range(self._count)]
        beside = self._beside[at > 0]
        is_unified = self._devices[at].is_unified
        for j in (self._count,) if is_last else range(1, self._count + 1):
            # `most` leaves out `beside`, which depends on the first position: the loop may end only if every longer run
            # is too large. `need` includes it.
            most = held[j] + self._buffer_mib + (self._sizes.logits if j == self._count else 0.0)
            for i in range(j - 1, -1, -1):
                if most - held[i] > rooms[i]:
                    # A run that begins earlier is longer and needs more, and a card's room does not depend on it.
                    if is_unified:  # but with shared memory, fewer layers on the CPU leave more room
                        continue
                    break
                need = most - held[i] + beside[i]
                if best[i] == _NEVER or need > rooms[i]:
                    continue
                hop = 0 if i == 0 else HOP.job
                found = (best[i][0] + cost[j] - cost[i] + hop, max(best[i][1], need / rooms[i]))
                if found < chosen[j]:
                    chosen[j], ends[j] = found, (*came[i], j)
        return chosen, ends

    def _row(self, at: int) -> tuple[Cost, ...]:
        """Return the costs of all positions on a device: the first layers with their experts on the CPU."""
        first = self._table.apart[at][: self._experts_on_cpu]
        return (*first, *self._table.gpus[at][self._experts_on_cpu :])

    def _placed(self, ends: tuple[int, ...], bound: int) -> Placed:
        cpu_layers = ends[0]
        runs = [
            (device, start, end)
            for device, (start, end) in zip(self._devices, itertools.pairwise(ends), strict=True)
            if end > start
        ]
        cost = self._cost(ends)
        shares = tuple(
            GpuAllocation(
                gpu=device,
                # The engine numbers the cards that are visible to it, and only the used ones are (server.py).
                device=f"CUDA{at}",
                layers=end - start,
                memory=self._need(int(at > 0), start, end),
            )
            for at, (device, start, end) in enumerate(runs)
        )
        placement = Placement(
            shares=shares,
            cpu_layers=cpu_layers if shares else 0,
            cpu_expert_layers=self._experts_on_cpu if shares else 0,
            split_mode="layer" if len(shares) > 1 else "none",
        )
        return Placed(placement=placement, host=self._host(cpu_layers), speed=cost.speed(), cost=bound)

    def _cost(self, ends: tuple[int, ...]) -> Cost:
        parts = list(self._table.cpu[: ends[0]])
        for at, (start, end) in enumerate(itertools.pairwise(ends)):
            if end > start:
                parts += (*self._row(at)[start:end], *([HOP] if start else []))
        return Cost(decode=sum(part.decode for part in parts), prefill=sum(part.prefill for part in parts))


def _sums(row: tuple[Cost, ...]) -> list[int]:
    """Return the running sums of the chat job's cost: the first j positions at index j."""
    return [0, *itertools.accumulate(cost.job for cost in row)]
