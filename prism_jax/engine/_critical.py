"""The critical path of single steps: which ops lie on it, and how much time all others have."""

from collections.abc import Iterator

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..maxplus import critical_ops, latest_ends, op_ends, op_latencies
from ._decide import STEP_TILES
from ._draw import given_scores, sobol_points
from ._plan import Plan
from ._pull_back import Composed
from ._replica import TILE, replica_latencies, strata_of
from ._step import barriers
from ._tiles import map_tiles, untile


# Latencies, ends and slack of all ops are held for so many op evaluations at once.
_MOST_OPS = 2**24


class CriticalPaths(eqx.Module):
    """Of some steps. Times in seconds, before the factor of the step.

    **Attributes:**

    - `step`: which of the composed steps.
    - `sample`: the replica sample that decides each, by its id.
    - `critical`: whether each op is on the critical path.
    - `latency`: of each op.
    - `slack`: by how much longer each op could take before its step would, all else being equal.
    - `rank`: the pipeline rank that the step waits for.
    - `reduction`: how long that rank reduces its gradients, exposed.
    - `factor`: of the step.
    """

    step: np.ndarray
    sample: np.ndarray
    critical: Bool[Array, "ops steps"]
    latency: Float[Array, "ops steps"]
    slack: Float[Array, "ops steps"]
    rank: np.ndarray
    reduction: np.ndarray
    factor: np.ndarray


def critical_paths(composed: Composed, chosen: np.ndarray) -> Iterator[CriticalPaths]:
    """The critical paths of some steps, a few at a time.

    **Arguments:**

    - `composed`: from `composed_steps`.
    - `chosen`: `(n,)`, the numbers of the steps, ascending.
    """
    number = int(np.clip(_MOST_OPS // composed.plan.program.num_ops, 16, TILE))
    for draws, decision in composed.parts:
        mine = chosen[(chosen >= draws.first) & (chosen < draws.first + draws.steps)]
        if not len(mine):
            continue
        finished, factor = _barriers(composed, decision)
        samples = decision.samples(0, draws.steps)
        points = sobol_points(draws, composed.key, decision.kept.ends.dtype)
        for start in range(0, len(mine), number):
            steps = mine[start : start + number]
            local = steps - draws.first
            kept = samples[local]
            ids = decision.kept.ids[kept]
            given = () if points is None else (points[ids - np.uint32(draws.first)],)
            ends, ready = decision.kept.ends[kept], finished[local]
            # A step takes no longer while each rank is ready when the last one is.
            most = ready.max(axis=1, keepdims=True) - (ready - ends)
            rank = ready.argmax(axis=1)
            # Short batches are padded, so that nothing is compiled twice.
            padded = [_padded(x, number) for x in (ids, rank, most, *given)]
            shared = (composed.plan, draws.lead, composed.key)
            critical, latency, slack = (x[:, : len(steps)] for x in _critical(shared, *padded))
            yield CriticalPaths(
                step=steps,
                sample=ids,
                critical=critical,
                latency=latency,
                slack=slack,
                rank=rank,
                reduction=(ready - ends)[np.arange(len(steps)), rank],
                factor=factor[local],
            )


def _padded(x: np.ndarray, number: int) -> np.ndarray:
    return np.concatenate([x, np.repeat(x[-1:], number - len(x), axis=0)])


def _barriers(composed: Composed, decision) -> tuple[np.ndarray, np.ndarray]:
    """When each rank of each step has reduced its gradients, and the step's factor."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    finished = map_tiles(
        _barrier_tile,
        (composed.plan, composed.key),
        decision.num_steps,
        lambda start, count, result: found.append(untile(result)),
        decision.inputs,
        first=decision.kept.first,
        tiles=STEP_TILES,
    )
    if not finished:
        raise KeyboardInterrupt
    ready, factor = zip(*found, strict=True)
    return np.concatenate(ready), np.concatenate(factor)


def _barrier_tile(shared, ids, ends, regimes):
    plan, key = shared
    finished, factor = barriers(plan, ends.T, ids, key, regimes)
    return finished.T, factor


@eqx.filter_jit
def _critical(shared, ids, rank, most, *points):
    plan: Plan
    plan, lead, key = shared
    levels = plan.program.levels
    regimes, stalls = strata_of(plan.program, ids)
    given, _ = given_scores(lead, ids, key, *points)
    drawn = replica_latencies(plan, ids, key, regimes, stalls, given)
    latencies = op_latencies(levels, drawn, ids.shape[0])
    ends = op_ends(levels, latencies)
    slack = latest_ends(levels, latencies, most.T) - ends
    critical = critical_ops(levels, ends, rank)
    slack = jnp.where(critical, 0, jnp.maximum(slack, 0))
    return critical, latencies, slack
