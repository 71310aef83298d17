"""The critical paths of single steps: which ops are on them, and the slack of all ops."""

from collections.abc import Iterator

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float

from ..maxplus import cell_latencies, cells, critical_ops, latest_ends, op_ends
from ..replica import TILE, Plan, led, replica_latencies
from ._run import composed
from ._simulated_steps import SimulatedSteps


# Latencies, ends and slack of all ops are held for so many op evaluations at once.
_MOST_OPS = 2**24


class CriticalPaths(eqx.Module):
    """The critical paths of some steps. Times are in seconds, before the factor of the step.

    **Attributes:**

    - `step`: the numbers of the steps.
    - `sample`: the id of the replica sample that decides each step.
    - `critical`: whether each op is on the critical path.
    - `latency`: the latency of each op.
    - `slack`: by how much longer each op could take before its step does, all else being equal.
    - `sink`: the sink that the step waits for.
    - `reductions`: how long after each sink its rank has reduced its gradients.
    - `factor`: the factor of each step.
    """

    step: np.ndarray
    sample: np.ndarray
    critical: Bool[np.ndarray, "ops steps"]
    latency: Float[np.ndarray, "ops steps"]
    slack: Float[np.ndarray, "ops steps"]
    sink: np.ndarray
    reductions: Float[np.ndarray, "sinks steps"]
    factor: np.ndarray


def critical_paths(simulated: SimulatedSteps, chosen: np.ndarray) -> Iterator[CriticalPaths]:
    """The critical paths of some steps, a few at a time.

    **Arguments:**

    - `simulated`: from `simulated_steps`.
    - `chosen`: `(n,)`, the numbers of the steps, ascending.
    """
    run, sinks = simulated.run, simulated.run.program.sinks.number
    levels = run.program.levels
    cell = cells(levels)[: levels.num_ops]
    number = int(np.clip(_MOST_OPS // run.plan.structure.replica.levels.ops.size, 16, TILE))
    lead, deciders = run.sampling.lead, simulated.deciders
    of_steps = chosen.astype(np.uint32), deciders.ends[chosen], deciders.regime[chosen]
    every_ready, _ = composed(run, *of_steps)
    for start in range(0, len(chosen), number):
        steps = chosen[start : start + number]
        ids = deciders.ids[steps]
        # Short batches are padded, so that nothing is compiled twice.
        drawn = _latencies((run.plan, lead, run.key), _padded(ids, number))
        latency = np.asarray(drawn)[cell, : len(steps)]
        ends, ready = op_ends(levels, latency), every_ready[start : start + number].T
        reductions = ready - deciders.ends[steps, :sinks].T
        sink = ready.argmax(axis=0)
        critical = critical_ops(levels, ends, sink)
        # A step takes no longer while each sink is ready when the last one is.
        latest = latest_ends(levels, latency, ready.max(axis=0) - reductions)
        yield CriticalPaths(
            step=steps,
            sample=ids,
            critical=critical,
            latency=latency,
            slack=np.where(critical, 0, np.maximum(latest - ends[: len(latest)], 0)),
            sink=sink,
            reductions=reductions,
            factor=np.asarray(simulated.composed.parts.factor)[steps],
        )


def exposed_reductions(
    simulated: SimulatedSteps,
) -> tuple[Float[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
    """For each step, how long after the last backward of the replica that decides it all gradients
    are reduced, and when, in seconds.
    """
    parts, last = simulated.composed.parts, simulated.run.program.sinks.is_last
    ends = simulated.deciders.ends[:, : len(last)][:, last].max(axis=1)
    factor, barrier = np.asarray(parts.factor), np.asarray(parts.barrier)
    return factor * (barrier - ends), factor * barrier


def _padded(x: np.ndarray, number: int) -> np.ndarray:
    return np.concatenate([x, np.repeat(x[-1:], number - len(x), axis=0)])


@eqx.filter_jit
def _latencies(shared, ids):
    """The latencies of all cells in some samples."""
    plan: Plan
    plan, lead, key = shared
    drawn = replica_latencies(plan, led(plan, lead, ids, key)[0], key)
    return cell_latencies(plan.structure.replica.levels, drawn, len(ids), plan.dtype)
