"""Finds kinds of ops whose latency depends on the microbatch's position in the step."""

import numpy as np
from jaxtyping import Float
from scipy.special import fdtri

from ..program import StepGraph
from ._profile import PositionFactor


# The probability of finding positions where there are none.
_BY_CHANCE = 1e-3


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

    **Arguments:**

    - `step`, `latencies`: the graph of the traced job, and the latencies of its ops.
    - `pp`: the number of stages.
    """
    found: list[PositionFactor] = []
    for (kind, stage), workers in _by_stage(step, pp).items():
        calls = sorted({step.call[op] for ops in workers.values() for op in ops})
        whole = all(sorted(step.call[op] for op in ops) == calls for ops in workers.values())
        seconds = np.array(
            [latencies[sorted(ops, key=step.call.__getitem__)] for ops in workers.values()]
            if whole
            else []
        )
        if seconds.size and len(calls) > 1 and np.all(seconds.mean(axis=(1, 2)) > 0):
            factors = _factors(seconds)
            found += [
                PositionFactor(kind, stage, m, float(f))
                for m, f in zip(calls, factors, strict=True)
                if f != 1
            ]
    return tuple(found)


def _by_stage(step: StepGraph, pp: int) -> dict[tuple[str, int], dict[int, list[int]]]:
    """The ops of each kind and stage by worker, except ops whose latency is in their twin."""
    found: dict[tuple[str, int], dict[int, list[int]]] = {}
    nodes = zip(step.kind, step.members, step.twin, strict=True)
    for op, (kind, members, twin) in enumerate(nodes):
        if not twin:
            mine = found.setdefault((kind, members[0] % pp), {})
            mine.setdefault(members[0], []).append(op)
    return found


def _factors(
    seconds: Float[np.ndarray, "workers positions steps"],
) -> Float[np.ndarray, " positions"]:
    """Factors of mean one, all one if positions do not differ by more than chance."""
    _, positions, steps = seconds.shape
    relative = np.mean(seconds / seconds.mean(axis=(1, 2), keepdims=True), axis=0)
    relative = relative - relative.mean(axis=0)  # The common part of a step is not of positions.
    effect = relative.mean(axis=1)
    seen = float(np.sum(effect**2)) / (positions - 1)
    degrees = (positions - 1) * (steps - 1)
    chance = float(np.sum((relative - effect[:, None]) ** 2)) / degrees / steps
    threshold = fdtri(positions - 1, degrees, 1 - _BY_CHANCE)
    if not seen > threshold * chance:
        return np.ones(positions)
    return 1 + effect * (1 - chance / seen)
