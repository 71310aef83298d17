"""One simulated step, op by op."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from .._installed import needed
from .._misc import plural
from .._summary import Shown, picked_attributes
from ..engine import critical_paths, simulated_steps
from ..maxplus import critical_ops, edges_of, op_ends, predecessors_of
from ..program import Program
from ._criticality import op_labels


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SampledStep(Shown):
    """One simulated step, with all ops of the replica that it waits for. Times are in seconds from
    the start of the step.

    **Attributes:**

    - `ops`: for each op of the replica: its `phase`, `stage`, `microbatch`, `rank` (for a
        send_recv, the sender), `start_s`, `end_s`, and whether it is `critical`, that is, on the
        critical path.
    - `path`: the indices of the ops on the critical path, from the first to the last.
    - `receivers`: for each send_recv, the index of the op that waits for it; for all other ops, -1.
    - `reduction_s`: `(ranks, 2)`, the start and the end of the exposed gradient reduction of each
        pipeline rank; equal where there is none.
    - `last_rank`: the rank that the step waits for.
    - `barrier_s`: when all ranks have met at the barrier. The tail takes from then to `step_s`.
    - `step_s`: the step time.
    - `quantile`: the quantile of the step time that was asked for.
    - `num_replicas`: the number of data-parallel replicas in the job. Only the slowest is described
        here.
    """

    ops: dict[str, np.ndarray]
    path: Int[np.ndarray, " path"]
    receivers: Int[np.ndarray, " ops"]
    reduction_s: Float[np.ndarray, "ranks 2"]
    last_rank: int
    barrier_s: float
    step_s: float
    quantile: float
    num_replicas: int

    @property
    def num_ranks(self) -> int:
        return len(self.reduction_s)

    def table(self) -> Any:
        """A polars frame of the ops, in the order of their starts."""
        pl = needed("polars")
        frame = pl.DataFrame(self.ops).sort("start_s", "rank", maintain_order=True)
        return frame.rename({"start_s": "start [s]", "end_s": "end [s]"})

    def headline(self) -> str:
        of = f", the slowest of {self.num_replicas:,} replicas" if self.num_replicas > 1 else ""
        ops, ranks = plural(len(self.receivers), "op"), plural(self.num_ranks, "pipeline rank")
        return (
            f"a step of {self.step_s:.5g} s, the p{100 * self.quantile:g} of the step time{of}\n"
            f"{ops} on {ranks}, {len(self.path):,} of them on the critical path, which ends on "
            f"rank {self.last_rank}"
        )

    def to_json(self) -> dict[str, Any]:
        """Figures of the step; its ops are those of `table`."""
        figures = picked_attributes(self, "quantile", "step_s", "num_ranks", "last_rank")
        return figures | {"num_ops": len(self.receivers), "critical_ops": len(self.path)}


def sample_step(
    program: Program,
    *,
    quantile: float = 0.5,
    num_samples: int = 10_000,
    key: "jax.Array",
    progress: bool = False,
) -> SampledStep:
    """Simulates steps, and returns all ops of the step at a quantile of the step time.

    **Arguments:**

    - `program`: the step.
    - `quantile`: which step, in [0, 1]: the shortest for which at least this share of the steps
        takes no longer.
    - `num_samples`: how many steps to simulate.
    - `key`: a `jax.random` key.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`SampledStep`][] of the replica that the step waits for, which decides it.

    **Raises:**

    `ValueError` for a quantile that is not in [0, 1], and wherever `simulate` raises it.
    """
    if not (isinstance(quantile, int | float) and 0 <= quantile <= 1):
        raise ValueError(f"`quantile={quantile!r}` must be a number in [0, 1].")
    simulated = simulated_steps(program, num_samples=num_samples, key=key, progress=progress)
    order = np.argsort(simulated.steps, kind="stable")
    chosen = order[[max(math.ceil(quantile * len(order)) - 1, 0)]]
    (paths,) = critical_paths(simulated, chosen)
    factor, sink = float(paths.factor[0]), int(paths.sink[0])
    levels, number = program.levels, program.num_ops
    every_end = op_ends(levels, (paths.latency * factor).astype(np.float64))
    critical = critical_ops(levels, every_end, paths.sink)[:, 0]
    every_end = every_end[:, 0]  # Of all ops and joins, and at last of "no op".
    starts, ends = every_end[predecessors_of(levels)].max(axis=1)[:number], every_end[:number]
    at_sinks = every_end[levels.sink_ops].max(axis=1)
    ready = at_sinks + np.maximum(paths.reductions[:, 0].astype(float), 0.0) * factor
    of_ranks = _of_ranks(program, ends, at_sinks, ready)
    rank = int(program.sinks.rank[sink])
    times = {"start_s": starts, "end_s": ends, "critical": critical}
    return SampledStep(
        ops=op_labels(program) | times,
        path=np.flatnonzero(critical),  # An op waits for those before it.
        receivers=_receivers(program),
        reduction_s=of_ranks,
        last_rank=rank if rank >= 0 else int(of_ranks[:, 1].argmax()),
        barrier_s=float(ready.max()),
        step_s=float(simulated.steps[chosen[0]]),
        quantile=float(quantile),
        num_replicas=program.num_replicas,
    )


def _of_ranks(program: Program, ends, at_sinks, ready) -> Float[np.ndarray, "ranks 2"]:
    """When each rank has ended, and when it has reduced its gradients. Where ranks have no sinks of
    their own, nothing is reduced.
    """
    sinks = program.sinks
    if sinks.rank[0] >= 0:
        firsts = np.searchsorted(sinks.rank, np.arange(program.num_ranks))
        return np.stack([at_sinks[sinks.is_last], np.maximum.reduceat(ready, firsts)], axis=1)
    ended, computes = np.zeros(program.num_ranks), ~program.ops.is_send_recv
    np.maximum.at(ended, program.ops.rank[computes], ends[computes])
    return np.stack([ended, ended], axis=1)


def _receivers(program: Program) -> Int[np.ndarray, " ops"]:
    """The op that receives the tensor of each send_recv: the first on another rank that waits for
    it.
    """
    rank, sends = program.ops.rank, program.ops.is_send_recv
    receivers = np.full(program.num_ops, -1)
    op, waits_for = edges_of(program.levels)
    taken = sends[waits_for] & ~sends[op] & (rank[op] != rank[waits_for])
    # Backwards, so that the first receiver is written last and remains.
    receivers[waits_for[taken][::-1]] = op[taken][::-1]
    return receivers
