"""Latencies without what is rare or fixed: constant parts, effects of positions, and stalls."""

import dataclasses

import numpy as np
from jaxtyping import Float
from scipy.special import fdtri

from .._estimate import stalled, typical
from ..data import Variation, load_priors
from ._data_factor import rough_data
from ._observe import Seen
from ._step_graph import ByKind, StepGraph, replayed_step_times


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
    """Latencies without what is rare or fixed, by kind.

    **Attributes:**

    - `constant`: what never varies, in seconds, one for all microbatches and steps.
    - `positions`: the factors of microbatches by their position in the step, for all replicas.
    - `body`: the latencies without either; `nan` in place of stalls.
    - `stalls`: the laws of stalls.
    """

    constant: ByKind
    positions: ByKind
    body: ByKind
    stalls: tuple[Variation, ...]


def clean_up(seen: Seen) -> Clean:
    """Takes constant parts, the factors of positions and stalls out of the latencies."""
    latencies, phases = seen.latencies, seen.step.phases
    constant = {
        kind: constant_parts(x) if kind in phases else np.zeros((1, 1, 1, 1))
        for kind, x in latencies.items()
    }
    varying = {kind: x - constant[kind] for kind, x in latencies.items()}
    # The latency of twins is in the other op.
    twins = seen.step.by_kind(np.array(seen.step.twin, float)[:, None])
    positions = {
        kind: position_factors(np.where(twins[kind] == 1, np.nan, x)) for kind, x in varying.items()
    }
    # The data of microbatches, from latencies that still include stalls.
    of_data = rough_data([varying[kind] / positions[kind] for kind in phases])
    relative = {**positions}
    for phase, kind in enumerate(phases):
        relative[kind] = of_data[:, :, phase] * positions[kind]
    body, stalls = take_out_stalls(seen, relative, constant)
    return Clean(constant, positions, {k: x / positions[k] for k, x in body.items()}, stalls)


def constant_parts(
    latencies: Float[np.ndarray, "replicas stages microbatches steps"],
) -> Float[np.ndarray, "replicas stages 1 1"]:
    """The part of the latencies of a kind of op that does not vary, in seconds: the same for all
    ops of a worker, and zero for most workers.

    Noise is relative: the slower the GPU, the more its latencies spread in seconds. If the
    latencies of a worker of the slower half spread relatively less than those of the faster half,
    by four standard errors, the worker has a constant part. It is so large that the rest has the
    relative spread of the faster half, but at most 95 % of the worker's shortest latency.

    Workers are compared with workers of the same stage in other replicas, and the constant part is
    at most the difference of their latencies. With one replica, they are compared with workers of
    all stages, although other stages may have other work.
    """
    constant, same_work = np.zeros((*latencies.shape[:2], 1, 1)), len(latencies) > 1
    present = ~np.isnan(latencies[:, :, 0, 0])
    for s in range(latencies.shape[1]) if same_work else [slice(None)]:
        workers = latencies[:, s][present[:, s]]
        constant[:, s, 0, 0][present[:, s]] = _constants(workers, same_work)
    return constant


def _constants(
    workers: Float[np.ndarray, "workers microbatches steps"], same_work: bool
) -> Float[np.ndarray, " workers"]:
    """The constant parts of the workers whose latencies of one kind of op are given. Steps share
    factors, so all ops of a step count as one draw.
    """
    centre, _ = typical(workers, (2,))
    level, spread = centre.mean(axis=(1, 2)), typical(workers - centre, (1, 2))[1].reshape(-1)
    slow, constant = level > np.median(level), np.zeros(len(workers))
    fast = ~slow & (spread > 0)
    if not np.all(level > 0) or not fast.any():
        return constant
    logs = np.log(spread[fast] / level[fast])
    relative = float(np.exp(np.median(logs)))
    # If the noise of fast workers differs by more than chance, that of slow workers may, too.
    scatter = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0
    error = max(_OF_SPREAD / np.sqrt(workers.shape[2]), scatter) * np.sqrt(1 + 1 / len(logs))
    least = float(np.median(level[fast])) if same_work else 0.0
    longest = np.minimum(level - least, (1 - _LEAST) * workers.min(axis=(1, 2)))
    narrow = slow & (spread < relative * level * np.exp(-_SEEN * error))
    return np.where(narrow, np.minimum(level - spread / relative, longest), 0)


def position_factors(
    latencies: Float[np.ndarray, "replicas stages microbatches steps"],
) -> Float[np.ndarray, "1 stages microbatches 1"]:
    """The mean latency of a kind of op at each position in the step, over that at all positions,
    for each stage where positions differ by more than chance (F test, with probability 0.001).

    The first forwards of a stage have caches, links or SMs to themselves; later forwards share
    these with backwards and transfers. A random factor in place of this would make steps vary too
    much.

    Positions are compared by means over replicas, because replicas may share factors in a step.
    Deviations are shrunk by the share that chance explains.
    """
    factors = np.ones((1, *latencies.shape[1:3], 1))
    present = ~np.isnan(latencies[..., 0])
    for s in range(latencies.shape[1]):
        replicas, places = present[:, s].any(axis=1), present[:, s].any(axis=0)
        seconds = latencies[replicas, s][:, places]
        if places.sum() > 1 and np.all(seconds.mean(axis=(1, 2)) > 0):
            factors[0, s, places, 0] = _factors(seconds)
    return factors


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
    seen: Seen, relative: ByKind, constant: ByKind
) -> tuple[ByKind, tuple[Variation, ...]]:
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
    step, step_times, prior = seen.step, seen.step_times, load_priors().outlier_share
    least = _SHARE * float(np.median(step_times))
    body, calm, laws = {}, {}, []
    for kind, latencies in seen.latencies.items():
        body[kind] = latencies - constant[kind]
        alike = body[kind] / relative[kind]
        usual = constant[kind] + typical(alike, (2, 3))[0] * relative[kind]
        calm[kind] = np.where(stalled(alike, (2, 3), least), usual, latencies)
    for kind, latencies in seen.latencies.items():
        stalls = calm[kind] < latencies
        if not 0 < np.mean(stalls.any(axis=(0, 1, 2))) < _MOST:
            continue  # Without stalls, or with so many that they belong to the body.
        body[kind][stalls] = np.nan
        cost = step_times - replayed_step_times(step, seen.latencies | {kind: calm[kind]})
        costs = cost[cost > least]
        if len(costs):
            size = float(np.exp(np.log(costs).mean()))
            # The posterior mean of the share of steps with a stall, with the prior of slow steps
            # of other systems.
            rare = len(costs) + prior.value * prior.observations
            rare /= len(cost) + prior.observations
            parameters = {
                "sigma": _size_spread(costs),
                "rate": rare / _delaying(step, kind, calm, size),
                "median_s": size,
            }
            source = f"{len(costs)} of {seen.source}"
            laws.append(Variation(kind, "stall", "lognormal", parameters, source))
    return body, tuple(laws)


def _delaying(step: StepGraph, kind: str, latencies: ByKind, size: float) -> float:
    """The number of ops of a kind, each weighted by the share of a stall on it that delays the
    step; waits for other ops hide the rest. Found by replaying steps with one stall each.
    """
    rng, number = np.random.default_rng(0), len(step.ops[kind])
    chosen = rng.permutation(number)[:_REPLAYED]
    steps = rng.integers(latencies[kind].shape[3], size=len(chosen))
    drawn = {name: x[..., steps] for name, x in latencies.items()}
    before = replayed_step_times(step, drawn)
    place = (axis[chosen] for axis in step.places[kind])
    drawn[kind][*place, np.arange(len(chosen))] += size
    shares = (replayed_step_times(step, drawn) - before) / size
    return max(float(np.mean(shares)) * number, 1.0)


def _size_spread(sizes: Float[np.ndarray, " stalls"]) -> float:
    """The spread of the logarithm of a stall's size; with few stalls, mostly that of the prior."""
    prior, logs = load_priors().outlier_spread, np.log(sizes)
    squares = prior.observations * prior.value**2 + np.sum((logs - logs.mean()) ** 2)
    return float(np.sqrt(squares / (prior.observations + len(logs) - 1)))
