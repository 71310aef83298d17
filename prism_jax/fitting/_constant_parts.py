"""Finds workers whose ops have a part that does not vary, such as a sleep or a wait of the host."""

import numpy as np
from jaxtyping import Float

from ..data import Job
from ..program import StepGraph
from ._robust import typical
from ._stalls import groups


# The standard errors by which a spread must be too small. That of the logarithm of a robust
# standard deviation is the second, over the root of the number of values (Rousseeuw and Croux,
# "Alternatives to the median absolute deviation", 1993: an efficiency of 37 %).
_SEEN = 4.0
_OF_SPREAD = 1.17
# What varies is at least this share of the shortest latency.
_LEAST = 0.05


def constant_parts(
    job: Job, step: StepGraph, latencies: Float[np.ndarray, "ops steps"]
) -> Float[np.ndarray, "ops 1"]:
    """The part of each op's latency that does not vary, in seconds: the same for all ops of a kind
    on a worker, and zero for most.

    Noise is relative: the slower the GPU, the more its latencies spread in seconds. A worker of the
    slower half whose latencies spread relatively less than those of the faster half, by four
    standard errors, has a constant part. Without it, its relative spread is theirs.

    Workers are compared with those of their stage in other replicas, or with one replica with those
    of all stages, although these may have other work.
    """
    constant = np.zeros((len(latencies), 1))
    stages = job.layout.pp if job.layout.dp > 1 else 1
    peers: dict[tuple[str, int], list[np.ndarray]] = {}
    for (kind, worker), ops in groups(step).items():
        if step.computes[ops[0]]:
            peers.setdefault((kind, worker % stages), []).append(ops)
    for workers in peers.values():
        _find(workers, latencies, constant)
    return constant


def _find(
    workers: list[np.ndarray],
    latencies: Float[np.ndarray, "ops steps"],
    constant: Float[np.ndarray, "ops 1"],
) -> None:
    """Writes the constant part of ops of one kind, of workers with the same work."""
    level, spread = np.array([_level_and_spread(latencies[ops]) for ops in workers]).T
    fast = level <= np.median(level)
    if not np.all(level > 0) or not np.any(spread[fast] > 0):
        return
    relative = float(np.median(spread[fast] / level[fast]))
    error = _OF_SPREAD * np.sqrt((1 + 1 / np.sum(fast)) / latencies.shape[1])
    for worker in np.flatnonzero(~fast):
        if spread[worker] < relative * level[worker] * np.exp(-_SEEN * error):
            ops = workers[worker]
            most = (1 - _LEAST) * float(np.min(latencies[ops]))
            constant[ops] = min(level[worker] - spread[worker] / relative, most)


def _level_and_spread(latencies: Float[np.ndarray, "ops steps"]) -> tuple[float, float]:
    """The mean over ops of their medians, and the robust standard deviation around these. Steps
    share factors, so that the ops of a step count as one draw.
    """
    centre, _ = typical(latencies, (1,))
    _, spread = typical(latencies - centre, (0, 1))
    return float(np.mean(centre)), float(spread.item())
