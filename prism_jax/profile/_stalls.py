"""The stalls of a traced job: they are removed from its latencies, and get laws of their own."""

import numpy as np
from jaxtyping import Float

from .._robust import stalled, typical
from ..data import Variation, load_priors
from ..program import StepGraph, replay
from ._compute import groups
from ._observe import Seen


# The least share of a step by which a stall delays it.
_SHARE = 1e-3
# Long latencies in more than this share of steps are not stalls.
_MOST = 0.2
# The most ops of a kind for which the share of a stall that delays the step is computed.
_REPLAYED = 128


def take_out_stalls(
    seen: Seen, relative: Float[np.ndarray, "ops steps"], constant: Float[np.ndarray, "ops 1"]
) -> tuple[Float[np.ndarray, "ops steps"], tuple[Variation, ...]]:
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
    least = _SHARE * float(np.median(step_times))
    usual = np.empty_like(latencies)
    long = np.empty(latencies.shape, bool)
    for ops in groups(step).values():
        alike = (latencies[ops] - constant[ops]) / relative[ops]
        usual[ops] = constant[ops] + typical(alike, (0, 1))[0] * relative[ops]
        long[ops] = stalled(alike, (0, 1), least)
    body, calm, laws = latencies - constant, np.where(long, usual, latencies), []
    for kind in dict.fromkeys(step.kind):
        mine = (np.array(step.kind) == kind)[:, None] & long
        if not 0 < np.mean(mine.any(axis=0)) < _MOST:
            continue  # Without stalls, or with so many that they belong to the body.
        body[mine] = np.nan
        cost = step_times - replay(step, np.where(mine, usual, latencies))
        costs = cost[cost > least]
        if len(costs):
            size = float(np.exp(np.log(costs).mean()))
            parameters = {
                "sigma": _size_spread(costs),
                "rate": _share(len(costs), len(cost)) / _delaying(step, kind, calm, size),
                "median_s": size,
            }
            source = f"{len(costs)} of {seen.source}"
            laws.append(Variation(kind, "stall", "lognormal", parameters, source))
    return body, tuple(laws)


def _delaying(
    step: StepGraph, kind: str, latencies: Float[np.ndarray, "ops steps"], size: float
) -> float:
    """The number of ops of a kind, each weighted by the share of a stall on it that delays the
    step; waits for other ops hide the rest. Found by replaying steps with one stall each.
    """
    ops, rng = np.flatnonzero(np.array(step.kind) == kind), np.random.default_rng(0)
    chosen = rng.permutation(ops)[:_REPLAYED]
    some = latencies[:, rng.integers(latencies.shape[1], size=len(chosen))]
    before = replay(step, some)
    some[chosen, np.arange(len(chosen))] += size
    shares = (replay(step, some) - before) / size
    return max(float(np.mean(shares)) * len(ops), 1.0)


def _share(number: int, steps: int) -> float:
    """The posterior mean of the share of steps with a stall, if `number` of `steps` had one, with
    the prior of slow steps of other systems.
    """
    prior = load_priors().outlier_share
    return (number + prior.value * prior.observations) / (steps + prior.observations)


def _size_spread(sizes: Float[np.ndarray, " stalls"]) -> float:
    """The spread of the logarithm of a stall's size; with few stalls, mostly that of the prior."""
    prior, logs = load_priors().outlier_spread, np.log(sizes)
    squares = prior.observations * prior.value**2 + np.sum((logs - logs.mean()) ** 2)
    return float(np.sqrt(squares / (prior.observations + len(logs) - 1)))
