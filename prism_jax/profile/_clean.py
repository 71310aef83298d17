"""Latencies without what is rare or fixed: constant parts, effects of positions, and stalls."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import fdtri

from .._estimate import stalled, typical
from ..data import Variation, load_priors
from ._components import data_of
from ._mean_squares import Latencies, at_ops, compute_logs, kinds, ops_by_kind
from ._observe import Seen
from ._op_latencies import replayed_step_times
from ._profile import PositionFactor
from ._step_graph import StepGraph


# How many standard errors a spread must be too small. The standard error of the logarithm of a
# robust standard deviation is `_OF_SPREAD` over the root of the number of values (Rousseeuw and
# Croux, "Alternatives to the median absolute deviation", 1993: an efficiency of 37 %).
_SEEN = 4.0
_OF_SPREAD = 1.17
# The least share of the shortest latency that varies.
_LEAST = 0.05
# The probability of finding positions where there are none.
_BY_CHANCE = 1e-3
# The least share of a step by which a stall delays it.
_SHARE = 1e-3
# Long latencies in more than this share of steps are not stalls.
_MOST = 0.2
# The most ops of a kind for which the share of a stall that delays the step is computed.
_REPLAYED = 128


@dataclasses.dataclass(frozen=True)
class Clean:
    """Latencies without what is rare or fixed.

    **Attributes:**

    - `constant`: what of each op never varies, in seconds.
    - `positions`: the factors of microbatches by their position in the step.
    - `body`: the latencies without either; `nan` in place of stalls.
    - `stalls`: the laws of stalls.
    """

    constant: Float[np.ndarray, "ops 1"]
    positions: tuple[PositionFactor, ...]
    body: Latencies
    stalls: tuple[Variation, ...]


def clean_up(seen: Seen) -> Clean:
    """Takes constant parts, the factors of positions and stalls out of the latencies."""
    step = seen.step
    constant = constant_parts(step, seen.latencies)
    varying = seen.latencies - constant
    positions = find_positions(step, varying)
    factors = position_factors(step, positions)[:, None]
    # The data of microbatches, from latencies that still include stalls.
    data = data_of(compute_logs(step, varying / factors))
    body, stalls = take_out_stalls(seen, at_ops(step, data.relative) * factors, constant)
    return Clean(constant, positions, body / factors, stalls)


def constant_parts(step: StepGraph, latencies: Latencies) -> Float[np.ndarray, "ops 1"]:
    """The part of each op's latency that does not vary, in seconds: the same for all ops of a kind
    on a worker, and zero for most.

    Noise is relative: the slower the GPU, the more its latencies spread in seconds. If the
    latencies of a worker of the slower half spread relatively less than those of the faster half,
    by four standard errors, the worker has a constant part. It is so large that the rest has the
    relative spread of the faster half, but at most 95 % of the worker's shortest latency.

    Workers are compared with workers of the same stage in other replicas, and the constant part is
    at most the difference of their latencies. With one replica, they are compared with workers of
    all stages, although other stages may have other work.
    """
    constant, stage = np.zeros((len(latencies), 1)), step.graph.stage
    same_work = bool(len(step.graph.last) > stage.max() + 1)
    peers: dict[tuple[str, int], list[np.ndarray]] = {}
    computes = step.computes
    for (kind, _), ops in ops_by_kind(step).items():
        if computes[ops[0]]:
            peers.setdefault((kind, same_work * int(stage[ops[0]])), []).append(ops)
    for workers in peers.values():
        seconds = _constants([latencies[ops] for ops in workers], same_work)
        for ops, part in zip(workers, seconds, strict=True):
            constant[ops] = part
    return constant


def _constants(workers: list[Latencies], same_work: bool) -> Float[np.ndarray, " workers"]:
    """The constant parts of the workers whose latencies of one kind of op are given."""
    level, spread = np.array([_level_and_spread(latencies) for latencies in workers]).T
    slow, constant = level > np.median(level), np.zeros(len(workers))
    fast = ~slow & (spread > 0)
    if not np.all(level > 0) or not fast.any():
        return constant
    logs = np.log(spread[fast] / level[fast])
    relative = float(np.exp(np.median(logs)))
    # If the noise of fast workers differs by more than chance, that of slow workers may, too.
    scatter = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0
    steps = workers[0].shape[1]
    error = max(_OF_SPREAD / np.sqrt(steps), scatter) * np.sqrt(1 + 1 / len(logs))
    least = float(np.median(level[fast])) if same_work else 0.0
    for w in np.flatnonzero(slow):
        if spread[w] < relative * level[w] * np.exp(-_SEEN * error):
            longest = min(level[w] - least, (1 - _LEAST) * float(np.min(workers[w])))
            constant[w] = min(level[w] - spread[w] / relative, longest)
    return constant


def _level_and_spread(latencies: Latencies) -> tuple[float, float]:
    """The mean of the medians of ops, and the robust standard deviation around these medians. Steps
    share factors, so all ops of a step count as one draw.
    """
    centre, _ = typical(latencies, (1,))
    _, spread = typical(latencies - centre, (0, 1))
    return float(np.mean(centre)), float(spread.item())


def position_factors(
    step: StepGraph, positions: Sequence[PositionFactor]
) -> Float[np.ndarray, " ops"]:
    """The factor of each op on the mean of its kind on its worker: one unless `positions` has
    another.
    """
    factors = {(p.kind, p.stage, p.microbatch): p.factor for p in positions}
    nodes = zip(step.kind, step.graph.stage.tolist(), step.call, strict=True)
    return np.array([factors.get(node, 1.0) for node in nodes])


def find_positions(step: StepGraph, latencies: Latencies) -> tuple[PositionFactor, ...]:
    """The mean latency at each position in the step, over that at all positions: for each kind of
    op of a stage where positions differ by more than chance (F test, with probability 0.001).

    The first forwards of a stage have caches, links or SMs to themselves; later forwards share
    these with backwards and transfers. A random factor in place of this would make steps vary too
    much.

    Positions are compared by means over replicas, because replicas may share factors in a step.
    Deviations are shrunk by the share that chance explains.
    """
    # By kind and stage, then by worker; without ops whose latency is in their twin.
    ops_by_worker: dict[tuple[str, int], dict[int, list[int]]] = {}
    graph = step.graph
    nodes = zip(step.kind, graph.stage.tolist(), graph.rank.tolist(), step.twin, strict=True)
    for op, (kind, stage, worker, twin) in enumerate(nodes):
        if not twin:
            ops_by_worker.setdefault((kind, stage), {}).setdefault(worker, []).append(op)
    factors: list[PositionFactor] = []
    for (kind, stage), workers in ops_by_worker.items():
        rows = [sorted(ops, key=step.call.__getitem__) for ops in workers.values()]
        calls = [[step.call[op] for op in ops] for ops in rows]
        places = sorted({*calls[0]})
        if len(places) < 2 or any(row != places for row in calls):
            continue
        seconds = np.array([latencies[ops] for ops in rows])
        if np.all(seconds.mean(axis=(1, 2)) > 0):
            pairs = zip(places, _factors(seconds).tolist(), strict=True)
            factors += [
                PositionFactor(kind, stage, m, factor) for m, factor in pairs if factor != 1
            ]
    return tuple(factors)


def _factors(
    seconds: Float[np.ndarray, "workers positions steps"],
) -> Float[np.ndarray, " positions"]:
    """Factors of mean one, all one if positions do not differ by more than chance."""
    _, positions, steps = seconds.shape
    ratios = np.mean(seconds / seconds.mean(axis=(1, 2), keepdims=True), axis=0)
    relative = ratios - ratios.mean(axis=0)  # The common part of a step is not of positions.
    effect = relative.mean(axis=1)
    between = float(np.sum(effect**2)) / (positions - 1)
    degrees = (positions - 1) * (steps - 1)
    chance = float(np.sum((relative - effect[:, None]) ** 2)) / degrees / steps
    if not between > fdtri(positions - 1, degrees, 1 - _BY_CHANCE) * chance:
        return np.ones(positions)
    return 1 + effect * (1 - chance / between)


def take_out_stalls(
    seen: Seen, relative: Latencies, constant: Float[np.ndarray, "ops 1"]
) -> tuple[Latencies, tuple[Variation, ...]]:
    """Removes stalls from latencies. A stall is a latency that is far longer than those of the
    worker's other ops of its kind, after `constant` is subtracted and the rest divided by
    `relative`, the effect of data. Latencies that are as long in many steps, as when some
    microbatches have far more work than others, are not stalls.

    The cost of a stall is found by replaying the step without it. Ops of one kind that stall in the
    same step count as one stall, because they delay the step together. All ops of the kind stall at
    one rate, on whichever worker stalls were seen. It is a posterior mean, because a single stall
    in a dozen steps does not imply a rate of one in twelve.

    **Returns:**

    The latencies without constant parts, with `nan` in place of stalls; and the laws of the stalls
    that delay steps.
    """
    step, latencies, step_times = seen.step, seen.latencies, seen.step_times
    prior = load_priors().outlier_share
    least = _SHARE * float(np.median(step_times))
    usual = np.empty_like(latencies)
    long = np.empty(latencies.shape, bool)
    for ops in ops_by_kind(step).values():
        alike = (latencies[ops] - constant[ops]) / relative[ops]
        usual[ops] = constant[ops] + typical(alike, (0, 1))[0] * relative[ops]
        long[ops] = stalled(alike, (0, 1), least)
    body, calm, laws = latencies - constant, np.where(long, usual, latencies), []
    for kind, ops in kinds(step).items():
        stalls = np.zeros_like(long)
        stalls[ops] = long[ops]
        if not 0 < np.mean(stalls.any(axis=0)) < _MOST:
            continue  # Without stalls, or with so many that they belong to the body.
        body[stalls] = np.nan
        cost = step_times - replayed_step_times(step, np.where(stalls, usual, latencies))
        costs = cost[cost > least]
        if len(costs):
            size = float(np.exp(np.log(costs).mean()))
            # The posterior mean of the share of steps with a stall, with the prior of slow steps
            # of other systems.
            rare = len(costs) + prior.value * prior.observations
            rare /= len(cost) + prior.observations
            parameters = {
                "sigma": _size_spread(costs),
                "rate": rare / _delaying(step, ops, calm, size),
                "median_s": size,
            }
            source = f"{len(costs)} of {seen.source}"
            laws.append(Variation(kind, "stall", "lognormal", parameters, source))
    return body, tuple(laws)


def _delaying(step: StepGraph, ops: np.ndarray, latencies: Latencies, size: float) -> float:
    """The number of ops, each weighted by the share of a stall on it that delays the
    step; waits for other ops hide the rest. Found by replaying steps with one stall each.
    """
    rng = np.random.default_rng(0)
    chosen = rng.permutation(ops)[:_REPLAYED]
    drawn = latencies[:, rng.integers(latencies.shape[1], size=len(chosen))]
    before = replayed_step_times(step, drawn)
    drawn[chosen, np.arange(len(chosen))] += size
    shares = (replayed_step_times(step, drawn) - before) / size
    return max(float(np.mean(shares)) * len(ops), 1.0)


def _size_spread(sizes: Float[np.ndarray, " stalls"]) -> float:
    """The spread of the logarithm of a stall's size; with few stalls, mostly that of the prior."""
    prior, logs = load_priors().outlier_spread, np.log(sizes)
    squares = prior.observations * prior.value**2 + np.sum((logs - logs.mean()) ** 2)
    return float(np.sqrt(squares / (prior.observations + len(logs) - 1)))
