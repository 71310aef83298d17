"""The outline of a step: what its workers run before and after the pipeline, and for whom they
wait.
"""

import functools as ft

import numpy as np

from ..data import Call, Outline
from ._ops import COMPUTE, PIPELINED, SCOPES
from ._trace import Trace


# A gap before an op that is longer than this share of a step hides a wait.
_LONG = 0.01


def outline(trace: Trace) -> Outline:
    """Reads off a trace in which order once-in-a-step ops run, and what they wait for.

    Some waits are not traced, such as the reduction of the loss over replicas: a worker then has a
    long gap before its next op. It is taken to wait for the group after whose last member's end
    the gap is shortest.
    """
    first = trace.start[COMPUTE[0]][..., 0]
    if "forward-recv" in trace.start:
        first = np.fmin(first, trace.start["forward-recv"][..., 0])
    once = [op for op in trace.start if op in SCOPES and op != "gc"]  # A pause, not an op.
    leading = [op for op in once if np.nanmean(trace.start[op][..., 0] - first) < 0]
    last = ft.reduce(np.fmax, (trace.end[op][..., -1] for op in _pipeline(trace)))
    before, _ = _calls(trace, leading, np.zeros_like(last))
    after, _ = _calls(trace, [op for op in once if op not in leading], last)
    return Outline(before, after)


def _pipeline(trace: Trace) -> list[str]:
    return [op for op in PIPELINED if op in trace.end]


def _calls(trace: Trace, ops: list[str], ends: np.ndarray) -> tuple[tuple[Call, ...], np.ndarray]:
    """Calls in the order of their starts, after what ends at `ends`, `(steps, dp, pp)`."""
    step_time = trace.step_times().mean()
    calls = []
    for op in sorted(ops, key=ft.cmp_to_key(ft.partial(_precedence, trace))):
        start, end = trace.start[op][..., 0], trace.end[op][..., 0]
        waits = np.where(np.isnan(start[0]), "", "self").astype("<U5")
        for place in np.argwhere(waits == "self"):
            gaps = {
                scope: start[:, *place] - ends[:, *members].max(axis=1)
                for scope, members in groups(place, ends.shape[1:]).items()
            }
            if gaps["self"].mean() < _LONG * step_time:
                continue
            possible = {s: g.mean() for s, g in gaps.items() if g.min() > -1e-4 * step_time}
            waits[*place] = min(possible, key=lambda s: possible[s], default="self")
        ends = np.where(np.isnan(end), ends, end)
        calls.append(Call(op, SCOPES[op], tuple(tuple(row) for row in waits.tolist())))
    return tuple(calls), ends


def _precedence(trace: Trace, one: str, other: str) -> int:
    """Negative where workers start one op before the other; workers may be far apart in time."""
    difference = trace.start[one] - trace.start[other]
    return int(np.sign(np.nansum(difference)))


def groups(place, shape) -> dict[str, tuple]:
    """For each scope, an index of the members of the group of a worker `(dp_rank, stage)`."""
    d, s = (int(x) for x in place)
    dp, pp = np.indices(shape).reshape(2, -1)
    chosen = {
        "self": (dp == d) & (pp == s),
        "dp": pp == s,
        "pp": dp == d,
        "world": np.ones(len(dp), bool),
    }
    return {scope: (dp[mine], pp[mine]) for scope, mine in chosen.items()}
