"""Every replica of every step, one after the other: no tiles, no weights, nothing compiled.

Whatever is faster must be equal to this in law. To understand the engine, begin here. The
tables of laws are the engine's own: `tests/independent.py`, which draws every kernel, checks these.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from ..host import on_host
from ..latency import cube_normal, scale_spread, score_of_maximum
from ..maxplus import op_ends
from ..op_law import NUM_SCORES, SCORE_RANGE, Tables
from ..program import Program, Sets
from ..replica import Plan, load_numbers, make_plan


def reference_steps(
    program: Program, num_steps: int, seed: int, *, same_gpus: bool = False
) -> Float[np.ndarray, " steps"]:
    """The times of steps in seconds. With `same_gpus`, all steps run on the same GPUs."""
    rng, plan, sinks = np.random.default_rng(seed), make_plan(program), program.sinks
    laws = jax.tree.map(np.asarray, plan.tables)
    regime = rng.choice(len(laws.network), num_steps, p=laws.network)
    ends = np.zeros((sinks.number, num_steps))
    for _ in range(program.num_replicas):
        ends = np.maximum(ends, _sinks(program, plan, laws, regime, rng, same_gpus))
    # The reductions of a rank run one after the other, while its last backwards run.
    after, remaining = np.zeros_like(ends), np.zeros(num_steps)
    for sink in reversed(range(sinks.number)):
        remaining, reduction = remaining * ~sinks.is_last[sink], sinks.reduction[sink]
        if reduction >= 0:
            remaining = remaining + _seconds(
                program, laws, reduction, regime, rng.normal(size=(1, num_steps))
            )
        after[sink] = remaining
    first = np.searchsorted(sinks.rank, sinks.rank)
    steps = (ends + after + sinks.contention * (after[first] - after)).max(axis=0)
    if program.tail >= 0:
        slowest, other_gpus, z = rng.normal(size=(3, num_steps))
        slowest = _factors(program.variability.rank, slowest, program.world_size)
        shared, z = (slowest, 1.0, other_gpus), z[None]
        steps += _seconds(program, laws, program.tail, regime, z, *shared, in_tail=True)[0]
    return steps * _factors(program.variability.step, rng.normal(size=num_steps))


def _sinks(program: Program, plan: Plan, laws: Tables, regime, rng, same_gpus) -> np.ndarray:
    """When the sinks of one replica end, `(sinks, steps)`."""
    laws_of, ops, groups = program.variability, program.ops, program.adjustment
    shape = program.num_ranks, len(regime)
    gpus = rng.normal(size=(2, shape[0], 1 if same_gpus else shape[1])) * np.ones(shape)
    slowest, other_gpus = _factors(laws_of.rank, gpus[0], program.group_size), gpus[1]
    if groups is not None:
        slowest = 1 + np.asarray(groups.gpu)[:, None] * (slowest - 1)
    worker = _factors(laws_of.worker_step, rng.normal(size=shape))
    data = _factors_of_data(laws_of.microbatch, rng, program.num_microbatches, shape[1])
    if plan.structure.classes.worker is not None:  # Those of the slowest worker.
        at_scores: Any = laws.slowest, laws.worker_step, laws.microbatch
        scores = np.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES)
        slowest, worker, data = (
            np.interp(z, scores, np.ones(NUM_SCORES) if table is None else table)
            for z, table in (
                (rng.normal(size=(number, shape[1])), table)
                for number, table in zip((*shape[:1] * 2, len(data)), at_scores, strict=True)
            )
        )
        slowest, worker = slowest * worker, np.ones(shape)
    pair, load_class = load_numbers(program)
    loads = rng.normal(size=(len(load_class), shape[1]))
    seconds = np.zeros((program.num_ops, shape[1]))
    for row, c in enumerate(program.rows.class_):
        in_row, rank, spread = ops.row == row, program.rows.rank[row], 1.0
        if groups is not None:
            spread = np.asarray(groups.spread)[np.asarray(groups.group)[in_row], None]
        z, shared = (
            rng.normal(size=(in_row.sum(), shape[1])),
            (slowest[rank], worker[rank], other_gpus[rank]),
        )
        seconds[in_row] = _seconds(program, laws, c, regime, z, *shared, spread)
        if laws.load is not None and (pair[in_row] >= 0).all():
            sway, skewness = laws.load
            skewness = skewness[load_class[pair[in_row]]][:, regime]
            deviations = np.asarray(on_host(cube_normal, loads[pair[in_row]], skewness))
            seconds[in_row] = np.maximum(seconds[in_row] + sway[c, regime] * deviations, 0)
        if program.blocks.compute[c] and laws.loading is not None:
            factor, loading = data[ops.microbatch[in_row]], laws.loading[c, regime]
            seconds[in_row] *= np.maximum(factor + (loading - 1) * (factor - 1), 0)
    if groups is not None:
        seconds *= np.asarray(groups.latency)[groups.group, None]
    kinds = sorted(laws_of.stalls)
    stalls = program.stall_ops, program.stall_kinds, program.stall_counts
    longest = np.zeros_like(seconds)
    for op, kind, calls in zip(*stalls, strict=True):
        stall = laws_of.stalls[kinds[kind]]
        step = np.repeat(np.arange(shape[1]), rng.poisson(float(stall.rate) * calls, shape[1]))
        sizes = _factors(stall.size, rng.normal(size=len(step))) * float(stall.size.mean())
        meeting = 0.0
        if laws.stall_slack is not None and laws.stall_meeting is not None:
            class_ = program.rows.class_[ops.row[op]]
            sizes = np.maximum(sizes - laws.stall_slack[kind, class_, regime[step]], 0)
            meeting = float(laws.stall_meeting[class_])
        for s, size in zip(step, sizes, strict=True):
            seconds[op, s] += size - meeting * min(size, longest[op, s])
            longest[op, s] = max(size, longest[op, s])
    return op_ends(program.levels, seconds)[program.levels.sink_ops].max(axis=1)


def _seconds(
    program: Program,
    laws: Tables,
    c,
    regime,
    z,
    slowest: Any = 1.0,
    worker: Any = 1.0,
    other_gpus: Any = 0.0,
    spread: Any = 1.0,
    *,
    in_tail: bool = False,
) -> np.ndarray:
    """The latencies of ops of class `c` at their scores, `(ops, steps)`, given the factors of the
    slowest GPU and of the worker, the score of the other GPUs, and a factor on their own spread.
    """
    kernel, compute = program.blocks.direct[c], program.blocks.compute[c]
    slowest, worker = (x * np.ones(len(regime)) if compute else 1.0 for x in (slowest, worker))
    if kernel >= 0:
        kind = program.latencies.kinds[program.latencies.kind[kernel]]
        shape = _factors(program.variability.residual.get(kind), z, 1, spread)
        return laws.mean[c, regime] * slowest * worker * shape
    shared = np.zeros_like(laws.moments[0]) if laws.shared is None else laws.shared
    tables = np.concatenate([laws.moments[:, c], shared[None, c]])
    at, nodes = slowest * np.ones(len(regime)), laws.tail_nodes if in_tail else laws.nodes
    of_regimes = [[np.interp(at, nodes, row) for row in table] for table in tables]
    mean, std, skewness, shared = np.array(of_regimes)[:, regime, np.arange(len(regime))]
    if in_tail:  # No other op runs on its GPUs.
        std = np.hypot(std, shared)
    else:
        mean = mean + other_gpus * shared
    if laws.communication is not None:  # The cumulants of compute and communication add up.
        mean_alone, std_alone, skewness_alone = laws.communication[:, c, regime]
        mean, third = mean_alone + worker * (mean - mean_alone), skewness_alone * std_alone**3
        third = third + worker**3 * (skewness * std**3 - third)
        std = np.sqrt(np.maximum(std_alone**2 + worker**2 * (std**2 - std_alone**2), 0))
        skewness = third / np.maximum(std, 1e-99) ** 3
    return np.maximum(mean + spread * std * np.asarray(on_host(cube_normal, z, skewness[None])), 0)


def _factors_of_data(law, rng, number: int, steps: int) -> np.ndarray:
    """The factor of each microbatch's data, and at last one for ops without a microbatch."""
    drawn = np.zeros((number, steps))
    if not isinstance(law, Sets):
        return np.concatenate([_factors(law, rng.normal(size=drawn.shape)), np.ones((1, steps))])
    factors = np.asarray(law.factors) / float(law.mean())
    for first in range(0, number, law.length):
        stretch = rng.integers(len(factors), size=steps)
        start = rng.integers(factors.shape[1] - law.length + 1, size=steps)
        for i in range(first, min(first + law.length, number)):
            drawn[i] = factors[stretch, start + i - first]
    return np.concatenate([drawn, np.ones((1, steps))])


def _factors(law, z: np.ndarray, number: int = 1, spread: float | np.ndarray = 1.0) -> np.ndarray:
    """The slowest of a number of draws of a law, relative to its mean, at scores."""
    if law is None:
        return np.ones(z.shape)
    z = z if number == 1 else np.asarray(on_host(score_of_maximum, z, np.float64(number)))
    return np.asarray(on_host(_relative, law, z, spread * np.ones(z.shape)))


def _relative(law, z, spread):
    return scale_spread(law, spread).from_normal(z) / law.mean()
