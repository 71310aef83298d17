"""`simulate` against a simulation that keeps a clock for each GPU and draws every kernel.

    python benchmarks/clocks.py                     # forty jobs, a table in Markdown
    python benchmarks/clocks.py --jobs 12 --json    # a row of JSON for each of the first twelve

The jobs are drawn by `--seed`: dense and interleaved pipelines, context parallelism, experts with
even and uneven loads, FSDP with and without tensor and context parallelism, ZeRO 1 to 3, frozen
layers, multi-token prediction; with laws of kernels, of all shared factors, of stalls and of a
congested network. The simulation (`Clocks`) takes the kernels of each unit with their means and the
order of ops from the package; what it draws, and who waits for whom, is written from docs/concepts.

A row has `simulate`'s mean, std and p99 over those of the simulation, minus one, and the standard
errors of the simulation's, as shares: `mean_error`, `std_error`, `p99_error`.
"""

import dataclasses
import functools as ft
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from prism_jax.data import Layer, Layout, Model, ScheduleConfig, Training, load_kernels
from prism_jax.lowering import lay_out, sinks_of
from prism_jax.workload import Costs
from prism_jax.workload._architecture import recomputed
from prism_jax.workload._block import Block, Branches, Kernel, Load, Row, Segment
from prism_jax.workload._data_parallel import received
from prism_jax.workload._split import deal
from prism_jax.workload._units import Unit, overlaps_layers, unit_of
from validation.tables import options, table


_JOBS, _SAMPLES, _STEPS = 40, 1_000, 50_000
# So many steps at a time stay small, and so many resampled ones give a standard error.
_BATCH, _RESAMPLES = 50, 100

# Log-normal sigmas of each kind of kernel, about those of `kernels/`.
RESIDUAL = {
    **dict.fromkeys(("gemm", "elementwise", "norm", "loss", "optimizer", "copies"), 0.015),
    **dict.fromkeys(("attention", "embedding", "all_gather", "reduce_scatter", "all_reduce"), 0.02),
    "all_to_all": 0.03,
    "send_recv": 0.05,
}


@dataclasses.dataclass(frozen=True)
class Laws:
    """What varies. Factors are log-normal with mean one, given by the sigma of their logarithm.

    **Attributes:**

    - `residual`: by kind of kernel.
    - `rank`, `worker_step`, `microbatch`, `step`: of the shared factors.
    - `network`: the probability that a step is congested, and how many times as long communication
        between nodes then takes.
    - `stalls`: by kind, the rate per call, and the median (in seconds) and sigma of a stall's size.
    """

    residual: Mapping[str, float]
    rank: float = 0.0
    worker_step: float = 0.0
    microbatch: float = 0.0
    step: float = 0.0
    network: tuple[float, float] | None = None
    stalls: Mapping[str, tuple[float, float, float]] = dataclasses.field(default_factory=dict)

    def variability(self) -> prism.Variability:
        """The same laws for a program."""

        def law(sigma: float, middle: float = 1.0) -> prism.latency.LogNormal:
            return prism.latency.LogNormal(jnp.asarray(middle), jnp.asarray(sigma))

        names = ("rank", "worker_step", "microbatch", "step")
        shared: dict[str, Any] = {n: law(s) for n in names if (s := getattr(self, n))}
        if self.network is not None:
            shared["network"] = prism.Network(*map(jnp.asarray, self.network))
        stalls = {
            kind: prism.Stall(jnp.asarray(rate), law(sigma, median))
            for kind, (rate, median, sigma) in self.stalls.items()
        }
        residual: dict[str, Any] = {kind: law(sigma) for kind, sigma in self.residual.items()}
        return prism.Variability(residual=residual, stalls=stalls, **shared)


def program_of(job: Costs, laws: Laws) -> prism.Program:
    """The program of a job with other laws than those of its kernels."""
    parts = job.model, job.layout, job.schedule, job.cluster
    options = {"training": job.training, "kernels": job.kernels}
    return prism.compile_program(*parts, **options, variability=laws.variability())


class Clocks:
    """The steps of a job. Clocks have the shape `(steps, gpus)`, with the GPUs of a pipeline rank
    in the order tensor and context parallel, then data parallel: a *worker* is the GPUs of one
    pipeline rank that run the same microbatch.
    """

    def __init__(self, job: Costs, laws: Laws, seed: int) -> None:
        self.laws, self.rng = laws, np.random.default_rng(seed)
        layout, kernels, training = job.layout, job.kernels, job.training
        self.order, self.graph, self.workload = lay_out(job)
        self.costs = msgspec.structs.replace(
            job,
            kernels=msgspec.structs.replace(
                kernels,
                compute=(layout.dp / kernels.num_replicas) ** kernels.growth * kernels.compute,
                floor_s=0.0 if training.cuda_graphs == "iteration" else training.launch_floor_s,
            ),
        )
        self.stages = deal(self.costs, self.order.stage_to_rank)
        self.units = ft.cache(self._units)
        self.worker = layout.tp * layout.cp
        self.gpus = self.worker * layout.dp
        self.network_links = {link.name for link in job.cluster.links[1:]}
        self.sinks = sinks_of(self.graph, self.workload)

    def steps(self, number: int) -> np.ndarray:
        """The times of so many steps, in seconds."""
        counts = [min(_BATCH, number - first) for first in range(0, number, _BATCH)]
        return np.concatenate([self._batch(count) for count in counts])

    def _batch(self, number: int) -> np.ndarray:
        graph, laws, ranks = self.graph, self.laws, len(self.graph.orders)
        self.number = number
        workers, microbatches = self.gpus // self.worker, int(graph.microbatch.max()) + 1
        gpu = self._factor(laws.rank, ranks, self.gpus)
        in_step = self._factor(laws.worker_step, ranks, workers)
        of_data = self._factor(laws.microbatch, microbatches, workers)
        self.slower = np.ones(number, np.float32)
        if laws.network is not None:
            chance, times = laws.network
            congested = self.rng.random(number) < chance
            self.slower = np.where(congested, times, 1) / (1 + chance * (times - 1))
        self.loads: dict[Any, np.ndarray] = {}
        ends: list[np.ndarray] = []
        for op in range(graph.num_ops):
            before = [ends[one] for one in graph.predecessors[op]]
            clocks = ft.reduce(np.maximum, before, np.zeros((number, self.gpus), np.float32))
            rank, microbatch, phase = graph.rank[op], graph.microbatch[op], str(graph.phase[op])
            if phase == "SR":
                kernel = self.workload.send_recv.get((int(rank), int(graph.peer[op])))
                if kernel is not None:  # Frozen stages get no gradients.
                    sent = self._calls(kernel, 1, self.groups)
                    clocks = clocks + np.repeat(sent, self.group, axis=1)
                ends.append(clocks)
                continue
            shared = np.repeat(in_step[:, rank] * of_data[:, microbatch], self.worker, axis=1)
            place = int(graph.stage[op]), int(microbatch)
            ends.append(self._op(clocks, phase, gpu[:, rank] * shared, place))
        return self._after(ends, gpu) * self._factor(laws.step)

    @property
    def group(self) -> int:
        """The GPUs of a pipeline rank that meet in every microbatch."""
        return self.workload.group_size

    @property
    def groups(self) -> int:
        return self.gpus // self.group

    def _factor(self, sigma: float, *shape: int) -> np.ndarray:
        z = self.rng.standard_normal((self.number, *shape), dtype=np.float32)
        return np.exp(np.float32(sigma) * z - np.float32(sigma**2 / 2))

    def _units(self, stage: int, phase: str) -> list[tuple[int, Unit]]:
        """The units of a phase in order, each with its place counted from the end of the stage, so
        that it is that of its forward.
        """
        back = phase != "F"
        runs = recomputed(self.stages.parts[stage], self.costs.training, back=back)
        units = [
            unit_of(self.costs, phase, part, again) for part, n, again in runs for _ in range(n)
        ]
        placed = list(enumerate(units, start=-len(units)))
        return placed[::-1] if back else placed

    def _op(self, clocks, phase: str, factor, place: tuple[int, int]) -> np.ndarray:
        """The clocks at the end of an op."""
        stage, training = place[0], self.costs.training
        step = {"F": -1, "B": 1, "I": 1}.get(phase)
        for one, times in received(self.costs, self.stages, stage, step) if step else ():
            for _ in range(times):
                clocks = self._segment(clocks, one, factor, place)
        placed = self.units(stage, phase)
        none = Unit([])
        units = [none, *(unit for _, unit in placed), none]
        sharded = overlaps_layers(training)
        for i, (layer, unit) in enumerate(placed):
            before, after = units[i], units[i + 2]
            where = (*place, layer)
            ahead = training.prefetch > 0
            behind = training.overlap_grad_reduce
            if sharded and not (ahead and before.segments):
                clocks = self._exposed(clocks, unit.gathers)
            beside = (*(after.gathers * ahead), *(before.reductions * behind))
            start = self._meet(clocks, self.gpus) if beside else clocks
            clocks = start
            for one in unit.segments:
                clocks = self._segment(clocks, one, factor, where)
            if beside:
                communication = sum(self._calls(kernel, 1, 1) for kernel in beside)
                clocks = start + _together(clocks - start, communication, self.costs.contention)
                clocks = self._meet(clocks, self.gpus)
            if sharded and not (behind and after.segments):
                clocks = self._exposed(clocks, unit.reductions)
        return clocks

    def _exposed(self, clocks, collectives: Iterable[Kernel]) -> np.ndarray:
        for kernel in collectives:
            clocks = self._meet(clocks, self.gpus) + self._calls(kernel, 1, 1)
        return clocks

    def _segment(self, clocks, one: Segment, factor, place) -> np.ndarray:
        """The clocks at the end of a segment, whose members wait for one another."""
        members = one.members or self.worker
        clocks = clocks + self._row(one.kernels, factor, place)
        for branches in one.branches:
            clocks = self._branches(clocks, branches, members, factor, place)
        if one.branches or one.collective is not None or one.members:
            clocks = self._meet(clocks, members)
        if one.collective is not None:
            clocks = clocks + self._collective(one.collective, members, place)
        return clocks

    def _branches(self, clocks, branches: Branches, members: int, factor, place) -> np.ndarray:
        start = self._meet(clocks, members)
        rows = [
            sum(self._collective(kernel, members, place) for kernel, n in row for _ in range(n))
            for row in branches.communication
        ]
        compute = clocks + self._row(branches.compute, factor, place) - start
        longest = ft.reduce(np.maximum, rows)
        return start + _together(np.maximum(compute, 0), longest, branches.contention)

    def _meet(self, clocks: np.ndarray, members: int) -> np.ndarray:
        """Each as late as the slowest of as many neighbours as meet."""
        groups = clocks.reshape(len(clocks), -1, members)
        return np.repeat(groups.max(axis=2), members, axis=1)

    def _row(self, row: Row, factor, place) -> np.ndarray:
        """How long each GPU takes for kernels, and for their stalls."""
        total = np.zeros((self.number, self.gpus), np.float32)
        for kernel, count in row:
            seconds = self._calls(kernel, count, self.gpus)
            if kernel.kind != "host":
                seconds = seconds * factor
            if kernel.load is not None:
                seconds = seconds * self._load(kernel.load, place)
            total += seconds
            if kernel.kind in self.laws.stalls:
                rate, median, sigma = self.laws.stalls[kernel.kind]
                steps, gpus = np.nonzero(stalls := self.rng.poisson(rate * count, total.shape))
                for step, g in zip(steps, gpus, strict=True):
                    sizes = self.rng.lognormal(np.log(median), sigma, stalls[step, g])
                    total[step, g] += sizes.sum()
        return total

    def _collective(self, kernel: Kernel, members: int, place) -> np.ndarray:
        """One draw for each group."""
        seconds = np.repeat(self._calls(kernel, 1, self.gpus // members), members, axis=1)
        if kernel.load is None:
            return seconds
        return seconds * self._meet(self._load(kernel.load, place), members)

    def _calls(self, kernel: Kernel, count: int, width: int) -> np.ndarray:
        """The sum of so many calls, `(steps, width)`."""
        sigma = np.float32(self.laws.residual.get(kernel.kind, 0.0))
        total = np.full((self.number, width), np.float32(kernel.mean * count), np.float32)
        if sigma:
            total[:] = 0
            for _ in range(count):
                z = self.rng.standard_normal(total.shape, dtype=np.float32)
                z *= sigma
                z -= sigma**2 / 2
                total += np.exp(z, out=z)
            total *= np.float32(kernel.mean)
        if kernel.link in self.network_links:
            total *= self.slower[:, None]
        return total

    def _load(self, load: Load, place) -> np.ndarray:
        """The load of each GPU: all kernels of a layer and a microbatch share it."""
        if (*place, load) not in self.loads:
            experts = load.members * load.experts
            groups = self.gpus // (load.members * load.split)
            shape = self.number, groups, experts
            if load.popularity:
                chances = np.broadcast_to(np.array(load.popularity) / sum(load.popularity), shape)
            elif np.isinf(load.concentration):
                chances = np.full(shape, 1 / experts)
            else:
                drawn = self.rng.gamma(load.concentration / experts, size=shape) + 1e-300
                chances = drawn / drawn.sum(axis=2, keepdims=True)
            counts = self.rng.multinomial(load.counts, chances) * (experts / load.counts)
            kept = np.minimum(counts, load.capacity).reshape(self.number, -1, load.experts)
            each = np.repeat(kept.mean(axis=2), load.split, axis=1)
            self.loads[*place, load] = each.astype(np.float32)
        return self.loads[*place, load]

    def _reduction(self, block: Block) -> np.ndarray:
        """How long all replicas together take for some collectives: one draw for all of them."""
        rows = [(one.collective, n) for one, n in block if one.collective is not None]
        calls = (self._calls(kernel, 1, 1)[:, 0] for kernel, n in rows for _ in range(n))
        return sum(calls, np.zeros(self.number))

    def _after(self, ends: list[np.ndarray], gpu: np.ndarray) -> np.ndarray:
        """When the gradients of all replicas are reduced and the tail has run."""
        ready, contention = np.zeros(self.number), self.workload.contention
        for rank in range(len(self.graph.orders)):
            sinks = [sink for sink in self.sinks if sink.rank == rank]
            starts = [np.max([ends[op].max(axis=1) for op in sink.ops], axis=0) for sink in sinks]
            reductions = [self._reduction(sink.reduction) for sink in sinks]
            for i, start in enumerate(starts):
                slowed = contention * sum(reductions[:i], np.zeros(self.number))
                ready = np.maximum(ready, start + slowed + sum(reductions[i:]))
        every = gpu.reshape(self.number, -1)
        for one, times in self.workload.tail:
            for _ in range(times):
                seconds = np.zeros(every.shape, np.float32)
                for kernel, count in one.kernels:
                    factor = 1 if kernel.kind == "host" else every
                    seconds = seconds + self._calls(kernel, count, every.shape[1]) * factor
                ready = ready + seconds.max(axis=1)
                if one.collective is not None:
                    ready = ready + self._calls(one.collective, 1, 1)[:, 0]
        return ready


def _together(compute, communication, contention: tuple[float, float]) -> np.ndarray:
    """When both have ended, if each slows the other while both run."""
    a, b = contention
    x, y = compute * np.float32(1 + a), communication * np.float32(1 + b)
    return np.where(x > y, y + (x - y) / np.float32(1 + a), x + (y - x) / np.float32(1 + b))


# What the jobs of a family have; they take turns.
_FAMILIES: dict[str, Mapping[str, Any]] = {
    "dense": {},
    "experts": {"experts": {}},
    "fsdp": {"zero": 3},
    "uneven experts": {"experts": {"balance": "dropless"}},
    "fsdp tp": {"zero": 3, "tp": 2},
    "interleaved": {"virtual_stages": 2},
    "context": {"cp": 2},
    "shared experts": {"experts": {"num_shared_experts": 2}},
    "zero 2": {"zero": 2},
    "frozen": {"frozen": True},
    "experts tp": {"experts": {"load_concentration": 40.0}, "tp": 2},
    "mtp": {"mtp": 1},
    "fsdp cp": {"zero": 3, "cp": 2},
    "capacity": {"experts": {"balance": "dropless", "capacity_factor": 1.5}},
    "fsdp experts": {"experts": {}, "zero": 3},
    "known experts": {"experts": {"load_popularity": tuple(np.linspace(0.7, 1.3, 32).tolist())}},
}


def drawn_job(seed: int, number: int) -> tuple[str, Costs, Laws]:
    """A job with its name and its laws. Families take turns, everything else is drawn."""
    rng = Random(f"{seed}, {number}")
    family, has = list(_FAMILIES.items())[number % len(_FAMILIES)]
    experts, zero = has.get("experts"), has.get("zero", rng.choice((0, 1, 1)))
    wide = experts is not None or zero >= 2  # Replicas that may meet in each microbatch.
    layout = Layout(
        tp=has.get("tp", 1 if wide else rng.choice((1, 2, 4))),
        cp=has.get("cp", 1),
        pp=1 if zero == 3 else 2 if "virtual_stages" in has else rng.choice((1, 2, 4)),
        dp=rng.choice((8, 16) if wide else (2, 4, 8)),
        ep=1 if experts is None else rng.choice((4, 8)),
        etp=1,
    )
    virtual = has.get("virtual_stages", 1)
    schedule = ScheduleConfig(
        "1f1b" if virtual == 1 else "interleaved-1f1b",
        num_microbatches=layout.pp * rng.choice((1, 2)),
        virtual_stages=virtual,
        blocking=rng.choice((None, False)),
    )
    training = Training(
        microbatch_size=1,
        sequence_length=4096 * layout.cp,
        zero=zero,
        accumulate_gradients=zero == 2 and rng.random() < 0.3,
        recompute=rng.choice(("none", "none", "full")),
        overlap_grad_reduce=zero >= 2 or virtual > 1,
        gradient_bucket_size=10**9,  # A backward of several pieces is not simulated.
        prefetch=rng.choice((1, 1, 0)),
        cp_comm_type=rng.choice(("p2p", "all_gather", "a2a")),
        overlap_shared_experts=family == "shared experts" and rng.random() < 0.7,
    )
    per_stage = rng.choice((2, 3))
    number_of_layers, last = layout.pp * virtual * per_stage, "mlp" if experts is None else "moe"
    frozen = per_stage if "frozen" in has else 0
    layers = [Layer(("attention", last), frozen=i < frozen) for i in range(number_of_layers)]
    model = Model(
        hidden_size=rng.choice((2048, 4096)),
        vocab_size=32_000,
        num_heads=32,
        num_kv_heads=8,
        ffn_size=8192,
        layers=tuple(layers),
        modules={} if experts is None else {"moe": _EXPERTS | experts},
        activation="swiglu",
        position="rotary",
        norm="rmsnorm",
        bias=False,
        num_mtp_layers=has.get("mtp", 0),
        name=family,
    )
    cluster = prism.load_cluster("dgx-h100", num_nodes=-(-layout.world_size // 8))
    kernels = msgspec.structs.replace(load_kernels(cluster), variability=())
    degrees = ", ".join(
        f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp", "ep")
    )
    name = f"{number} {family}: {degrees}, zero {zero}"
    return name, Costs(model, layout, schedule, training, cluster, kernels), _laws(rng)


_EXPERTS = {"num_experts": 32, "top_k": 4, "expert_ffn_size": 1024}


def _laws(rng: Random) -> Laws:
    def maybe(chance: float, *values: float) -> float:
        return rng.choice(values) if rng.random() < chance else 0.0

    return Laws(
        RESIDUAL,
        rank=maybe(0.7, 0.005, 0.01, 0.02),
        worker_step=maybe(0.3, 0.005, 0.01),
        microbatch=maybe(0.4, 0.01, 0.03, 0.05),
        step=maybe(0.4, 0.003, 0.01),
        # Often enough that a few hundred steps show their law.
        network=(0.3, 2.0) if rng.random() < 0.25 else None,
        stalls={"gemm": (1e-3, 1e-3, 0.5)} if rng.random() < 0.25 else {},
    )


def rows(seed: int, jobs: Iterable[int], samples: int) -> Iterator[dict[str, Any]]:
    """A row for each of the jobs: see the top of this file."""
    for number in jobs:
        name, job, laws = drawn_job(seed, number)
        law = prism.simulate(program_of(job, laws), num_samples=_STEPS, key=jax.random.key(0))
        steps = Clocks(job, laws, seed).steps(samples)
        found, rng = _figures(steps), np.random.default_rng(0)
        again = [_figures(rng.choice(steps, len(steps))) for _ in range(_RESAMPLES)]
        names = ("mean", "std", "p99")
        ratios = np.array([law.mean, law.std, law.quantile(0.99)]) / found - 1
        errors = np.std(again, axis=0) / found
        yield {
            "job": name,
            "seed": seed,
            **dict(zip(names, ratios.tolist(), strict=True)),
            **{f"{n}_error": e for n, e in zip(names, errors.tolist(), strict=True)},
        }


def _figures(steps: np.ndarray) -> np.ndarray:
    return np.array([steps.mean(), steps.std(), np.quantile(steps, 0.99)])


def main() -> None:
    known: dict[str, Any] = {
        "seed": {"type": int, "default": 0, "help": "draws the jobs"},
        "jobs": {"type": int, "default": _JOBS, "help": "how many"},
        "samples": {"type": int, "default": _SAMPLES, "help": "steps of the simulation"},
        "json": {"action": "store_true", "help": "a row of JSON for each"},
    }
    given, begin = options(__doc__, **known), time.perf_counter()
    every = rows(given.seed, range(given.jobs), given.samples)
    if given.json:
        for row in every:
            print(json.dumps(row), flush=True)
        return
    cells = [
        (row["job"], *(f"{100 * row[n]:+.2f} ± {100 * row[f'{n}_error']:.2f}" for n in _NAMES))
        for row in every
    ]
    print(table(("job", "mean [%]", "std [%]", "p99 [%]"), cells))
    print(f"\n{time.perf_counter() - begin:.0f} s")


_NAMES = ("mean", "std", "p99")


if __name__ == "__main__":
    main()
