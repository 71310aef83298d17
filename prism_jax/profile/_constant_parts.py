"""Finds workers whose ops have a part that does not vary, such as a sleep or a wait of the host."""

import numpy as np
from jaxtyping import Float

from .._robust import typical
from ..data import Job
from ..program import StepGraph
from ._compute import groups


# How many standard errors a spread must be too small. The standard error of the logarithm of a
# robust standard deviation is `_OF_SPREAD` over the root of the number of values (Rousseeuw and
# Croux, "Alternatives to the median absolute deviation", 1993: an efficiency of 37 %).
_SEEN = 4.0
_OF_SPREAD = 1.17
# The least share of the shortest latency that varies.
_LEAST = 0.05


def constant_parts(
    job: Job, step: StepGraph, latencies: Float[np.ndarray, "ops steps"]
) -> Float[np.ndarray, "ops 1"]:
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
    constant = np.zeros((len(latencies), 1))
    same_work = job.layout.dp > 1
    stages = job.layout.pp if same_work else 1
    peers: dict[tuple[str, int], list[np.ndarray]] = {}
    for (kind, worker), ops in groups(step).items():
        if step.computes[ops[0]]:
            peers.setdefault((kind, worker % stages), []).append(ops)
    for workers in peers.values():
        _find(workers, latencies, constant, same_work)
    return constant


def _find(
    workers: list[np.ndarray],
    latencies: Float[np.ndarray, "ops steps"],
    constant: Float[np.ndarray, "ops 1"],
    same_work: bool,
) -> None:
    """Writes the constant part of the ops of one kind."""
    level, spread = np.array([_level_and_spread(latencies[ops]) for ops in workers]).T
    slow = level > np.median(level)
    fast = ~slow & (spread > 0)
    if not np.all(level > 0) or not fast.any():
        return
    logs = np.log(spread[fast] / level[fast])
    relative = float(np.exp(np.median(logs)))
    # If the noise of fast workers differs by more than chance, that of slow workers may, too.
    scatter = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0
    error = max(_OF_SPREAD / np.sqrt(latencies.shape[1]), scatter) * np.sqrt(1 + 1 / len(logs))
    least = float(np.median(level[fast])) if same_work else 0.0
    for worker in np.flatnonzero(slow):
        if spread[worker] < relative * level[worker] * np.exp(-_SEEN * error):
            ops = workers[worker]
            longest = min(level[worker] - least, (1 - _LEAST) * float(np.min(latencies[ops])))
            constant[ops] = min(level[worker] - spread[worker] / relative, longest)


def _level_and_spread(latencies: Float[np.ndarray, "ops steps"]) -> tuple[float, float]:
    """The mean of the medians of ops, and the robust standard deviation around these medians. Steps
    share factors, so all ops of a step count as one draw.
    """
    centre, _ = typical(latencies, (1,))
    _, spread = typical(latencies - centre, (0, 1))
    return float(np.mean(centre)), float(spread.item())
