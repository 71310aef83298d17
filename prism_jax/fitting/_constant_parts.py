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
    standard errors, has a constant part: so much that the rest spreads relatively as theirs do, but
    no more than 95 % of its shortest latency.

    Workers are compared with those of their stage in other replicas, and the constant part is no
    more than what they are slower by. With one replica, they are compared with those of all stages,
    although these may have other work.
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
    # Where the noise of the fast workers differs by more than chance, so may that of the slow.
    scatter = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0
    error = max(_OF_SPREAD / np.sqrt(latencies.shape[1]), scatter) * np.sqrt(1 + 1 / len(logs))
    least = float(np.median(level[fast])) if same_work else 0.0
    for worker in np.flatnonzero(slow):
        if spread[worker] < relative * level[worker] * np.exp(-_SEEN * error):
            ops = workers[worker]
            longest = min(level[worker] - least, (1 - _LEAST) * float(np.min(latencies[ops])))
            constant[ops] = min(level[worker] - spread[worker] / relative, longest)


def _level_and_spread(latencies: Float[np.ndarray, "ops steps"]) -> tuple[float, float]:
    """The mean over ops of their medians, and the robust standard deviation around these. Steps
    share factors, so that the ops of a step count as one draw.
    """
    centre, _ = typical(latencies, (1,))
    _, spread = typical(latencies - centre, (0, 1))
    return float(np.mean(centre)), float(spread.item())
