"""Finds waits that the graph lacks, which a replay mistakes for work."""

import numpy as np
from jaxtyping import Float

from ..program import LAUNCH, StepGraph, replay


# The least number of steps that are replayed for each kind.
_STEPS = 200
# A kind gets a note if it changes the mean by more than the first share, or if it is a launch that
# takes more than the second.
_MOVES = 0.005
_LONG = 0.01


def shuffled_means(step: StepGraph, latencies: Float[np.ndarray, "ops steps"]) -> dict[str, float]:
    """The relative change of the mean of replayed steps if the latencies of a kind of op are
    shuffled over steps, for each kind except compute.

    A replay reproduces the steps with any graph, because a missing edge becomes latency of the next
    op. Such a latency is correlated with the rest of its step, so the mean changes when shuffling
    removes the correlation.
    """
    rng = np.random.default_rng(0)
    times = max(-(-_STEPS // latencies.shape[1]), 1)
    mean = float(np.mean(replay(step, latencies)))
    kinds, moved = np.array(step.kind), {}
    for kind in dict.fromkeys(step.kind):
        mine = np.flatnonzero(kinds == kind)
        if kind in step.phases or not np.ptp(latencies[mine]) > 0:
            continue
        means = []
        for _ in range(times):
            shuffled = latencies.copy()
            # All workers of a kind are shuffled together, because a shared factor is not a wait.
            shuffled[mine] = latencies[mine][:, rng.permutation(latencies.shape[1])]
            means.append(np.mean(replay(step, shuffled)))
        moved[kind] = float(np.mean(means)) / mean - 1
    return moved


def notes_of_waits(
    step: StepGraph, latencies: Float[np.ndarray, "ops steps"], moved: dict[str, float]
) -> tuple[str, ...]:
    """Warnings about waits that may be missing; `moved` is from `shuffled_means`."""
    notes = [
        f"shuffling `{kind}` among the steps changes their mean by {100 * by:+.2g} %: its "
        "latencies contain a wait that the graph lacks"
        for kind, by in moved.items()
        if abs(by) > _MOVES
    ]
    mean, kinds = float(np.mean(replay(step, latencies))), np.array(step.kind)
    for kind in dict.fromkeys(step.kind):
        longest = float(latencies[kinds == kind].mean(axis=1).max()) / mean
        if kind.startswith(LAUNCH) and longest > _LONG:
            notes.append(f"`{kind}` takes up to {100 * longest:.2g} % of a step on average")
    return tuple(notes)
