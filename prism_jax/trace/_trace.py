"""A trace: when the ops of some steps of a job started and ended, and which ops there are; and the
outline of its steps, which is what workers do and wait for before and after the pipeline.
"""

import dataclasses
import functools as ft
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ..data import Call, Job, Outline


# Ops that a worker runs for each microbatch of each of its stages, and their letters in the tokens
# of schedules. A backward is one op, or two: of the input, on which the next stage waits, and of
# the weights.
LETTERS = {"forward-compute": "F", "backward-compute": "B"}
LETTERS |= {"backward-input": "I", "backward-weight": "W"}
COMPUTE = tuple(LETTERS)
# Transfers between stages, with the distance of the other stage.
TRANSFERS = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
PIPELINED = (*COMPUTE, *TRANSFERS)
# Ops that a worker runs once in a step, and with whom: the other replicas of its stage, the last
# stage of its replica, all workers, or no worker whose op is in the trace.
SCOPES = {
    "load-data": "self",
    "params-all-gather": "dp",
    "grads-reduce-scatter": "dp",
    "embedding-grads-all-reduce": "pp",
    "optimizer-clip-main-grad": "world",
    "layernorm-grads-all-reduce": "self",
    "optimizer": "self",
    "gc": "self",
}
OPS = (*PIPELINED, *SCOPES)
FORWARD_COMPUTE, BACKWARD_COMPUTE, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
LOAD_DATA = "load-data"  # The time of a step before its first op.
REDUCE = "grads-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Trace:
    """The ops of some steps of a job. Times are in seconds from the start of each step.

    **Attributes:**

    - `job`: the layout and the schedule of the traced job.
    - `steps`: `(steps,)`, the numbers of the steps.
    - `start`, `end`: for each kind of op, an array `(steps, dp, pp, calls)` of when each call
        starts and ends. There is a call for each microbatch of the first stage on the rank, then
        for those of its next stage; or a single call. `nan` if a worker has no such op.
    - `dropped`: how many rows or steps were left out, by reason.
    - `notes`: warnings for readers of a fit to the trace.
    """

    job: Job
    steps: Int[np.ndarray, " steps"]
    start: dict[str, Float[np.ndarray, "steps dp pp calls"]]
    end: dict[str, Float[np.ndarray, "steps dp pp calls"]]
    dropped: dict[str, int]
    notes: tuple[str, ...] = ()

    def step_times(self) -> Float[np.ndarray, " steps"]:
        """The time from the first start to the last end in each step, in seconds."""
        low = np.min([np.nanmin(x, axis=(1, 2, 3)) for x in self.start.values()], axis=0)
        high = np.max([np.nanmax(x, axis=(1, 2, 3)) for x in self.end.values()], axis=0)
        return high - low

    def __getitem__(self, chosen: slice | Int[np.ndarray, " chosen"]) -> "Trace":
        """The same trace with only some of its steps."""
        return dataclasses.replace(
            self,
            steps=self.steps[chosen],
            start={op: x[chosen] for op, x in self.start.items()},
            end={op: x[chosen] for op, x in self.end.items()},
        )


# An op does not wait for another op that ends after its start in more than this share of steps; in
# a few steps, errors of clocks and pauses may look so.
_EARLY, _TOLERANCE = 0.05, 1e-4
# A group explains a wait where, without it, the gap before an op is longer by more than this share
# of a step. A worker that is nearly always the last waits in few steps, so that the longest gaps
# are compared: the mean of this share of them.
_LATE, _WAIT = 0.05, 1e-3


def outline(trace: Trace) -> Outline:
    """Finds the order of the ops that run once in a step, and what they wait for, from a trace.

    Some waits are not traced, such as the reduction of the loss over replicas: a worker then has a
    long gap before its next op, in all or some steps. It is assumed to wait for the group for which
    the gap after the end of the group's last member is shortest, by the mean of the longest gaps of
    all steps; of several such groups, for the smallest.
    """
    starts = [trace.start[op] for op in (COMPUTE[0], "forward-recv") if op in trace.start]
    first = ft.reduce(np.fmin, (np.fmin.reduce(x, axis=-1) for x in starts))
    once = [op for op in trace.start if op in SCOPES and op != "gc"]  # A pause, not an op.
    leading = [op for op in once if np.nanmean(trace.start[op][..., 0] - first) < 0]
    ends = (trace.end[op] for op in PIPELINED if op in trace.end)
    last = ft.reduce(np.fmax, (np.fmax.reduce(x, axis=-1) for x in ends))
    before = _calls(trace, leading, np.zeros_like(last))
    return Outline(before, _calls(trace, [op for op in once if op not in leading], last))


def _calls(trace: Trace, ops: list[str], ends: np.ndarray) -> tuple[Call, ...]:
    """The calls in the order of their starts, after ops with these `ends`, `(steps, dp, pp)`."""

    def precedence(one: str, other: str) -> int:
        """Negative if each worker starts `one` before `other`; workers may be far apart in time."""
        return int(np.sign(np.nansum(trace.start[one] - trace.start[other])))

    step_time = trace.step_times().mean()
    calls = []
    for op in sorted(ops, key=ft.cmp_to_key(precedence)):
        start, end = trace.start[op][..., 0], trace.end[op][..., 0]
        waits = np.where(np.isnan(start[0]), "", "self").astype("<U5")
        for place in np.argwhere(waits == "self"):
            gaps = {
                scope: (start[:, *place] - ends[:, *members].max(axis=1)) / step_time
                for scope, members in groups(place, ends.shape[1:]).items()
            }
            waits[*place] = _scope(gaps)
        ends = np.where(np.isnan(end), ends, end)
        calls.append(Call(op, SCOPES[op], tuple(tuple(row) for row in waits.tolist())))
    return tuple(calls)


def _scope(gaps: dict[str, np.ndarray]) -> str:
    """The group that a worker waits for, from the gap after the end of each group in each step, as
    a share of the step. Groups are sorted from the smallest, the worker itself, to the largest.
    """
    chosen, shortest = "self", np.inf
    for scope, gap in gaps.items():
        early, late = np.quantile(gap, _EARLY), gap[gap >= np.quantile(gap, 1 - _LATE)].mean()
        if (scope == "self" or early > -_TOLERANCE) and late < shortest - _WAIT:
            chosen, shortest = scope, late
    return chosen


def groups(place: Any, shape: tuple[int, int]) -> dict[str, tuple[Any, ...]]:
    """For each scope, an index of the members of the group of a worker `(dp_rank, stage)`: itself,
    the replicas of its stage, the stages of its replica, itself and all last stages, who share the
    loss, or everyone.
    """
    d, s = (int(x) for x in place)
    dp, pp = np.indices(shape).reshape(2, -1)
    chosen = {
        "self": (dp == d) & (pp == s),
        "dp": pp == s,
        "pp": dp == d,
        "last": (pp == shape[1] - 1) | ((dp == d) & (pp == s)),
        "world": np.ones(len(dp), bool),
    }
    return {scope: (dp[mine], pp[mine]) for scope, mine in chosen.items()}
