"""The reference step, which the engine and every baseline simulate, and the baselines.

It is 1F1B with forwards and backwards only. A forward waits for the forward of the stage before. A
backward waits for the backward of the stage after, or at the last stage for its own forward. Each
op also waits for the op before it on its stage. Durations are independent and log-normal.

NumPy simulates in single precision, on one thread or in processes: samples in chunks, in which each
op is a row, contiguous over samples. Durations are drawn for a few ops at a time. The row of an
op's end is reused when no other op waits for it, so that a chunk fits in the cache of a core. Every
operation writes into an existing array. Normal variates take most of the time. NumPy draws its own
one by one, by a ziggurat. Its uniforms are cheap, and its logarithms, sines and cosines use vector
instructions. So the Box-Muller transform is about three times as fast, and it is the default. Of
NumPy's generators, SFC64 is the fastest.

SimPy simulates discrete events. One process for each stage runs the ops of the stage in turn. It
waits for the events of other stages that the op needs, then for the op's duration. Then it triggers
the op's own event if another stage needs it. A step is an environment of its own, and its durations
are drawn together with NumPy. For speed, a process does not wait for an event that has been
triggered already. `pip install simpy` installs it; the benchmark was run with version 4.1.

mc_dagprop is a Monte Carlo propagator over event graphs written in C++. An activity is an op. An
event is the end of an op, or the start of the step. An op that waits for several others has the
same activity for each of them, so that it is drawn once. The library has exponential, gamma and
tabulated delays. The nearest to a log-normal is a table: the underlying normal variate takes values
half a unit apart, weighted by its density. This keeps the mean and the variance to six digits. A
finer table would be slower. Version 0.9.1 (`pip install mc_dagprop==0.9.1`) needs Python 3.12 and
NumPy 2.4.
"""

import functools as ft
from typing import Any, NamedTuple

import numpy as np


# The mean of an op's duration, in seconds, for each phase.
MEANS = {"F": 1.0, "B": 2.0}

# The standard deviation of the logarithm of an op's duration.
SIGMA = 0.05


class Graph(NamedTuple):
    """The ops of a step in a topological order, of which the last op ends last.

    **Attributes:**

    - `predecessors`: for each op, the ops that it waits for.
    - `phase`: `F` or `B`.
    - `stage`: the stage that runs the op, one op after the other in the order of the ops.
    """

    predecessors: list[tuple[int, ...]]
    phase: list[str]
    stage: list[int]

    @property
    def num_ops(self) -> int:
        """The number of ops, which is the number of draws in a sample."""
        return len(self.phase)

    @property
    def means(self) -> list[float]:
        """The mean duration of each op."""
        return [MEANS[phase] for phase in self.phase]


def reference_graph(stages: int = 8, microbatches: int = 32) -> Graph:
    """The graph of 1F1B, in which an op waits for at most two others."""
    # Here, so that worker processes and other interpreters can import this module without JAX.
    from prism_jax.schedule import OneFOneB, op_graph

    graph = op_graph(OneFOneB(stages, microbatches))
    ops = [op for op, phase in enumerate(graph.phase) if phase != "SR"]
    new = {op: i for i, op in enumerate(ops)}
    # A send_recv waits for its producer alone; who waits for it waits for the producer.
    for op in {*range(graph.num_ops)}.difference(ops):
        (producer,) = graph.predecessors[op]
        new[op] = new[producer]
    predecessors = [tuple(sorted({new[p] for p in graph.predecessors[op]})) for op in ops]
    each = [(str(graph.phase[op]), int(graph.stage[op])) for op in ops]
    return Graph(predecessors, [phase for phase, _ in each], [stage for _, stage in each])


# Samples per chunk, at most.
CHUNK = 8192

# Ops whose durations are drawn together; an even number.
ROWS = 8


def makespans(graph: Graph, num_samples: int, seed: Any, *, box_muller: bool = True) -> np.ndarray:
    """The makespans of `num_samples` steps, on one thread.

    **Arguments:**

    - `graph`, `num_samples`, `seed`: the step, how often it runs, and the seed of the draws, a
        number or a `SeedSequence`.
    - `box_muller`: whether normal variates are made of uniforms or, with `False`, are those of
        `Generator.standard_normal`.
    """
    # As many chunks, of one size: the last one is simulated whole too.
    chunk = -(-num_samples // -(-num_samples // CHUNK))
    rng = np.random.Generator(np.random.SFC64(seed))
    # The exponential of a normal has the median one, so its mean is not.
    scale = (np.exp(-(SIGMA**2) / 2) * np.array(graph.means)[:, None]).astype(np.float32)
    row_of, num_rows = _assign_rows(graph)
    waits = [[row_of[p] for p in before] for before in graph.predecessors]
    ends = list(np.empty((num_rows, chunk), np.float32))
    durations, scratch = (np.empty((n, chunk), np.float32) for n in (ROWS, ROWS // 2))
    result = np.empty(num_samples, np.float32)
    for begin in range(0, num_samples, chunk):
        for op, (row, before) in enumerate(zip(row_of, waits, strict=True)):
            if op % ROWS == 0:
                _draw(rng, durations, scratch if box_muller else None)
                block = durations[: graph.num_ops - op]
                np.multiply(block, scale[op : op + ROWS], out=block)
            _end(ends, row, before, durations[op % ROWS])
        part = result[begin : begin + chunk]
        part[:] = ends[row_of[-1]][: len(part)]
    return result


def makespans_in(pool, graph: Graph, num_samples: int, seed: int, **options) -> np.ndarray:
    """The same as `makespans`, with equal parts simulated by the two processes of a pool."""
    sizes = [num_samples // 2, num_samples - num_samples // 2]
    of_part = ft.partial(makespans, graph, **options)
    return np.concatenate(list(pool.map(of_part, sizes, np.random.SeedSequence(seed).spawn(2))))


def _draw(rng: np.random.Generator, out: np.ndarray, scratch: np.ndarray | None) -> None:
    """Fills an array with log-normal variates of median one; a scratch array means Box-Muller."""
    if scratch is None:
        rng.standard_normal(dtype=np.float32, out=out)
        np.multiply(out, np.float32(SIGMA), out=out)
    else:
        rng.random(dtype=np.float32, out=out)
        radius, angle = out[: len(scratch)], out[len(scratch) :]
        # A uniform may be zero, but is never one.
        np.subtract(np.float32(1), radius, out=radius)
        np.log(radius, out=radius)
        np.multiply(radius, np.float32(-2 * SIGMA**2), out=radius)
        np.sqrt(radius, out=radius)
        np.multiply(angle, np.float32(2 * np.pi), out=angle)
        np.sin(angle, out=scratch)
        np.cos(angle, out=angle)
        np.multiply(radius, angle, out=angle)
        np.multiply(radius, scratch, out=radius)
    np.exp(out, out=out)


def _end(ends: list[np.ndarray], row: int, before: list[int], duration: np.ndarray) -> None:
    """Writes the end of an op, whose row may be that of an op which it waits for."""
    if not before:
        ends[row][:] = duration
        return
    start = ends[before[0]]
    for other in before[1:]:
        start = np.maximum(start, ends[other], out=ends[row])
    np.add(start, duration, out=ends[row])


def _assign_rows(graph: Graph) -> tuple[list[int], int]:
    """For each op the row that holds its end, and the number of rows."""
    last_use = {p: op for op, before in enumerate(graph.predecessors) for p in before}
    row_of, free = [], []
    for op, before in enumerate(graph.predecessors):
        free += [row_of[p] for p in before if last_use[p] == op]
        row_of.append(free.pop() if free else 1 + max(row_of, default=-1))
    return row_of, 1 + max(row_of)


# Steps per call of the library, which keeps every event's time of each of them.
BATCH = 64

# The values of the normal variate in the table.
NORMALS = np.linspace(-6, 6, 25)


def by_simpy(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
    """The makespans of `num_samples` steps, one after the other."""
    import simpy

    rng, location = np.random.default_rng(seed), np.log(graph.means) - SIGMA**2 / 2
    each = zip(graph.stage, graph.predecessors, strict=True)
    waits = [[p for p in before if graph.stage[p] != stage] for stage, before in each]
    awaited = sorted({p for before in waits for p in before})
    orders = [np.flatnonzero(np.equal(graph.stage, s)).tolist() for s in sorted({*graph.stage})]

    def run_stage(env, order, durations, ended):
        for op in order:
            for p in waits[op]:
                if not ended[p].triggered:
                    yield ended[p]
            yield env.timeout(durations[op])
            if op in ended:
                ended[op].succeed()

    result = np.empty(num_samples, np.float32)
    for i in range(num_samples):
        env = simpy.Environment()
        ended = {op: env.event() for op in awaited}
        durations = rng.lognormal(location, SIGMA).tolist()
        for order in orders:
            env.process(run_stage(env, order, durations, ended))
        env.run()
        result[i] = env.now
    return result


def by_mc_dagprop(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
    """The makespans of `num_samples` steps, on one thread."""
    propagator = _propagator(graph)
    seeds = np.random.default_rng(seed).integers(2**31, size=num_samples).tolist()
    result = np.empty(num_samples, np.float32)
    for begin in range(0, num_samples, BATCH):
        batch = propagator.run_many(seeds[begin : begin + BATCH])
        # A view of the events' times; the library's properties would copy them.
        result[begin : begin + BATCH] = [memoryview(step)[-1] for step in batch]
    return result


def _propagator(graph: Graph) -> Any:
    import mc_dagprop

    generator = mc_dagprop.GenericDelayGenerator()
    phases = list(MEANS)
    factors = np.exp(SIGMA * NORMALS - SIGMA**2 / 2)
    weights = np.exp(-(NORMALS**2) / 2).tolist()
    for kind, mean in enumerate(MEANS.values()):
        generator.add_empirical_absolute(kind, (mean * factors).tolist(), weights)
    activities, precedence = {}, []
    # Event 0 is the start of the step, so the end of op `i` is event `i + 1`.
    for op, before in enumerate(graph.predecessors):
        sources, kind = [p + 1 for p in before] or [0], phases.index(graph.phase[op])
        activities[sources[0], op + 1] = mc_dagprop.Activity(op, 0.0, kind)
        precedence.append((op + 1, [(source, op) for source in sources]))
    at_start = mc_dagprop.EventTimestamp(0.0, 0.0, 0.0)
    events = [mc_dagprop.Event(str(i), at_start) for i in range(graph.num_ops + 1)]
    context = mc_dagprop.DagContext(events, activities, precedence, float("inf"))
    return mc_dagprop.MonteCarloPropagator(context, generator)
