"""The outline of a step: the ops of its workers before and after the pipeline, and their waits."""

import functools as ft
from typing import Any

import numpy as np

from ..data import Call, Outline
from ._trace import COMPUTE, PIPELINED, SCOPES, Trace


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
    before, _ = _calls(trace, leading, np.zeros_like(last))
    after, _ = _calls(trace, [op for op in once if op not in leading], last)
    return Outline(before, after)


def _calls(trace: Trace, ops: list[str], ends: np.ndarray) -> tuple[tuple[Call, ...], np.ndarray]:
    """The calls in the order of their starts, after ops with these `ends`, `(steps, dp, pp)`."""
    step_time = trace.step_times().mean()
    calls = []
    for op in sorted(ops, key=ft.cmp_to_key(ft.partial(_precedence, trace))):
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
    return tuple(calls), ends


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


def _precedence(trace: Trace, one: str, other: str) -> int:
    """Negative if each worker starts `one` before `other`; workers may be far apart in time."""
    difference = trace.start[one] - trace.start[other]
    return int(np.sign(np.nansum(difference)))


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
