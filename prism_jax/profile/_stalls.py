"""The stalls of a traced job: they are removed from its latencies, and get laws of their own."""

import dataclasses

import numpy as np
from jaxtyping import Float

from .._robust import stalled, typical
from ..data import Variation
from ..program import StepGraph, replay
from ._stall_prior import size_spread, stall_share


# The least share of a step by which a stall delays it.
_SHARE = 1e-3
# Long latencies in more than this share of steps are not stalls.
_MOST = 0.2
# The most ops of a kind for which the share of a stall that delays the step is computed.
_REPLAYED = 128


@dataclasses.dataclass(frozen=True)
class Stalls:
    """Latencies without stalls, and the laws of stalls.

    **Attributes:**

    - `body`: the latencies without constant parts, with `nan` in place of stalls. Latencies that
        are as long in many steps, as when some microbatches have far more work than others, are not
        stalls.
    - `laws`: the laws of the stalls that delay steps.
    """

    body: Float[np.ndarray, "ops steps"]
    laws: tuple[Variation, ...]


def groups(step: StepGraph) -> dict[tuple[str, int], np.ndarray]:
    """The ops of each kind on each worker."""
    found: dict[tuple[str, int], list[int]] = {}
    for op, (kind, members) in enumerate(zip(step.kind, step.members, strict=True)):
        found.setdefault((kind, members[0]), []).append(op)
    return {key: np.array(ops) for key, ops in found.items()}


def take_out_stalls(
    step: StepGraph,
    latencies: Float[np.ndarray, "ops steps"],
    step_times: Float[np.ndarray, " steps"],
    relative: Float[np.ndarray, "ops steps"],
    constant: Float[np.ndarray, "ops 1"],
) -> Stalls:
    """Removes stalls from latencies. A stall is a latency that is far longer than those of the
    worker's other ops of its kind, after `constant` is subtracted and the rest divided by
    `relative`, the effect of data.

    The cost of a stall is found by replaying the step without it. Ops of one kind that stall in the
    same step count as one stall, because they delay the step together. All ops of the kind stall at
    one rate, on whichever worker stalls were seen. It is a posterior mean, because a single stall
    in a dozen steps does not imply a rate of one in twelve.
    """
    least = _SHARE * float(np.median(step_times))
    usual = np.empty_like(latencies)
    seen = np.empty(latencies.shape, bool)
    for ops in groups(step).values():
        alike = (latencies[ops] - constant[ops]) / relative[ops]
        usual[ops] = constant[ops] + typical(alike, (0, 1))[0] * relative[ops]
        seen[ops] = stalled(alike, (0, 1), least)
    body = latencies - constant
    laws = []
    for kind in dict.fromkeys(step.kind):
        mine = (np.array(step.kind) == kind)[:, None] & seen
        if not 0 < np.mean(mine.any(axis=0)) < _MOST:
            continue  # Without stalls, or with so many that they belong to the body.
        body[mine] = np.nan
        cost = step_times - replay(step, np.where(mine, usual, latencies))
        delayed = cost > least
        if delayed.any():
            calm, costs = np.where(seen, usual, latencies), cost[delayed]
            size = float(np.exp(np.log(costs).mean()))
            parameters = {
                "sigma": size_spread(costs),
                "rate": stall_share(len(costs), len(cost)) / _delaying(step, kind, calm, size),
                "median_s": size,
            }
            source = f"{len(costs)} of {len(cost)} traced steps"
            laws.append(Variation(kind, "stall", "lognormal", parameters, source))
    return Stalls(body, tuple(laws))


def _delaying(
    step: StepGraph, kind: str, latencies: Float[np.ndarray, "ops steps"], size: float
) -> float:
    """The number of ops of a kind, each weighted by the share of a stall on it that delays the
    step; waits for other ops hide the rest. Found by replaying steps with one stall each.
    """
    ops, rng = np.flatnonzero(np.array(step.kind) == kind), np.random.default_rng(0)
    stalled = rng.permutation(ops)[:_REPLAYED]
    some = latencies[:, rng.integers(latencies.shape[1], size=len(stalled))]
    before = replay(step, some)
    some[stalled, np.arange(len(stalled))] += size
    shares = (replay(step, some) - before) / size
    return max(float(np.mean(shares)) * len(ops), 1.0)
