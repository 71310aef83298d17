"""Ops whose latency depends on the microbatch's position in the step, such as the first of its
stage.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import fdtri

from ..program import StepGraph
from ._profile import PositionFactor


# The probability of finding positions where there are none.
_BY_CHANCE = 1e-3


def position_factors(
    step: StepGraph, positions: Sequence[PositionFactor], pp: int
) -> Float[np.ndarray, " ops"]:
    """The factor of each op on the mean of its kind on its worker: one unless `positions` has
    another. `pp` is the number of stages.
    """
    factors = {(p.kind, p.stage, p.microbatch): p.factor for p in positions}
    nodes = zip(step.kind, step.members, step.call, strict=True)
    return np.array(
        [factors.get((kind, members[0] % pp, call), 1.0) for kind, members, call in nodes]
    )


def find_positions(
    step: StepGraph, latencies: Float[np.ndarray, "ops steps"], pp: int
) -> tuple[PositionFactor, ...]:
    """The mean latency at each position in the step, over that at all positions: for each kind of
    op of a stage where positions differ by more than chance (F test, with probability 0.001).

    The first forwards of a stage have caches, links or SMs to themselves; later forwards share
    these with backwards and transfers. A random factor in place of this would make steps vary too
    much.

    Positions are compared by means over replicas, because replicas may share factors in a step.
    Deviations are shrunk by the share that chance explains.
    """
    # By kind and stage, then by worker; without ops whose latency is in their twin.
    found: dict[tuple[str, int], dict[int, list[int]]] = {}
    nodes = zip(step.kind, step.members, step.twin, strict=True)
    for op, (kind, members, twin) in enumerate(nodes):
        if not twin:
            mine = found.setdefault((kind, members[0] % pp), {})
            mine.setdefault(members[0], []).append(op)
    factors: list[PositionFactor] = []
    for (kind, stage), workers in found.items():
        each = [sorted(ops, key=step.call.__getitem__) for ops in workers.values()]
        calls = [[step.call[op] for op in ops] for ops in each]
        places = sorted({*calls[0]})
        if len(places) < 2 or any(one != places for one in calls):
            continue
        seconds = np.array([latencies[ops] for ops in each])
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
    each = np.mean(seconds / seconds.mean(axis=(1, 2), keepdims=True), axis=0)
    relative = each - each.mean(axis=0)  # The common part of a step is not of positions.
    effect = relative.mean(axis=1)
    between = float(np.sum(effect**2)) / (positions - 1)
    degrees = (positions - 1) * (steps - 1)
    chance = float(np.sum((relative - effect[:, None]) ** 2)) / degrees / steps
    if not between > fdtri(positions - 1, degrees, 1 - _BY_CHANCE) * chance:
        return np.ones(positions)
    return 1 + effect * (1 - chance / between)
