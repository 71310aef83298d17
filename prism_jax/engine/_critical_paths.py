"""The critical paths of single steps: which ops are on them, and the slack of all ops."""

from collections.abc import Iterator

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float

from ..maxplus import cell_latencies, cells, critical_ops, latest_ends, op_ends
from ..replica import TILE, Plan, led, replica_latencies
from ..step import AbstractOneDecides
from ._run import Chunk, Run, step_tiles
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
    run = simulated.run
    lanes, levels = run.plan.structure.graph.lanes, run.program.levels
    cell = cells(levels, lanes.width)[: levels.num_ops]
    number = int(np.clip(_MOST_OPS // lanes.ops.size, 16, TILE))
    for chunk in simulated.chunks:
        draws, decision = chunk.draws, chunk.decision
        assert isinstance(decision, AbstractOneDecides)
        mine = chosen[(chosen >= draws.first) & (chosen < draws.first + draws.steps)]
        if not len(mine):
            continue
        finished, factor = _barriers(run, chunk)
        samples = decision.samples(0, draws.steps)
        for start in range(0, len(mine), number):
            steps = mine[start : start + number]
            local = steps - draws.first
            ids = decision.kept.ids[samples[local]]
            # Short batches are padded, so that nothing is compiled twice.
            drawn = _latencies((run.plan, draws.sampling.lead, run.key), _padded(ids, number))
            latency = np.asarray(drawn)[cell, : len(steps)]
            ends = op_ends(levels, latency)
            ready = finished[local].T
            reductions, sink = ready - decision.kept.ends[samples[local]].T, ready.argmax(axis=0)
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
                factor=factor[local],
            )


def exposed_reductions(
    simulated: SimulatedSteps,
) -> tuple[Float[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
    """For each step, how long after the last backward all gradients are reduced, and when, in
    seconds.
    """
    run, last = simulated.run, simulated.run.program.sinks.last
    waited, ended = [], []
    for chunk in simulated.chunks:
        finished, factor = _barriers(run, chunk)
        ends = chunk.decision.ends(0, chunk.steps)[:, last].max(axis=1)
        barrier = finished.max(axis=1)
        waited.append(factor * (barrier - ends))
        ended.append(factor * barrier)
    return np.concatenate(waited), np.concatenate(ended)


def _padded(x: np.ndarray, number: int) -> np.ndarray:
    return np.concatenate([x, np.repeat(x[-1:], number - len(x), axis=0)])


def _barriers(run: Run, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """When each step has reduced its gradients, by each sink, and the step's factor."""
    found = []
    for batch in step_tiles(run, [chunk]):
        found.append(batch.samples(lambda arrays: (arrays[1], arrays[2].factor)))
    ready, factor = zip(*found, strict=True)
    return np.concatenate(ready)[:, : run.program.sinks.number], np.concatenate(factor)


@eqx.filter_jit
def _latencies(shared, ids):
    """The latencies of all cells in some samples."""
    plan: Plan
    plan, lead, key = shared
    drawn = replica_latencies(plan, led(plan, lead, ids, key)[0], key)
    return cell_latencies(plan.structure.graph.lanes, drawn, len(ids), plan.dtype)
