"""A trace: which ops there are, and by which names of ranges, as frameworks write them or a file
defines them; when those of some steps of a job started and ended; and the outline of its steps,
which is what workers do and wait for before and after the pipeline.
"""

import dataclasses
import functools as ft
import itertools as it
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float, Int

from .._files import Path, shown
from .._misc import quoted, unknown_name
from ..data import Call, Job, Outline, located, read_struct


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


class RangeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule for ranges that are ops of one kind.

    **Attributes:**

    - `range`: a regular expression that must match the whole name. Its groups `microbatch` and
        `stage` are read, if it has them; otherwise microbatches are counted in the order of time.
    - `op`: the kind of op.
    """

    range: str
    op: str


class KernelRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule for kernels that communicate: the regular expression `kernel` is found in their names,
    and they run the `collective`.
    """

    kernel: str
    collective: str


class RangeNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to read the names of ranges and kernels.

    **Attributes:**

    - `ops`: the rules, of which the first that matches is used.
    - `step`: a regular expression with a group `step` for the range of a step. By default the marks
        of PyTorch's profiler or, without these, ranges that count steps, such as `iteration 3`.
    - `order`: the order of ranks, the innermost degree of parallelism first.
    - `kernels`: the rules of kernels that communicate, besides those that are known.
    """

    ops: tuple[RangeRule, ...] = ()
    step: str | None = None
    order: tuple[str, ...] = ("tp", "cp", "dp", "pp")
    kernels: tuple[KernelRule, ...] = ()

    def op_of(self, name: str) -> tuple[str, int, int] | None:
        """The kind, the microbatch and the stage of an op; -1 for what its name does not say."""
        rules = (*((re.fullmatch(rule.range, name), rule.op) for rule in self.ops),)
        for match, op in it.chain(rules, ((text.fullmatch(name), op) for text, op in _FRAMEWORKS)):
            if match:
                groups = match.groupdict()
                number, stage = (_number(groups.get(g), name) for g in ("microbatch", "stage"))
                return op, number, stage
        return None

    def is_part(self, name: str) -> bool:
        """Whether a range has a phase only, and may be one of several, or a part, of an op."""
        by_rule = any(re.fullmatch(rule.range, name) for rule in self.ops)
        return not by_rule and _PARTS.fullmatch(name) is not None

    def steps_of(self, names: Sequence[str]) -> list[int | None]:
        """The number of the step whose range has each of some names."""
        for text in (_MARK, _COUNTED) if self.step is None else (re.compile(self.step),):
            matches = [text.fullmatch(name) for name in names]
            if any(matches):
                return [match and _number(match["step"], match[0], 2**31) for match in matches]
        return [None] * len(names)


_ACTION, _CALL = r"PP:(?P<stage>\d+)", r"(?P<microbatch>\d+)"
_COMPUTE = rf"[-_ ]?(?:compute|step|pass)?(?:[-_ #]{_CALL})?"
_MEGATRON = ("params-all-gather", "embedding-grads-all-reduce", "layernorm-grads-all-reduce")
# `PP:2F7` are the actions of torch.distributed.pipelining's schedules, `Forward 7` those of its
# GPipe; `forward-compute` and such are the timers of Megatron-LM, and `## forward ##` the ranges of
# TorchRec, `mlp(B)` those of DualPipe. Two ops in one exchange have a `+` between them.
_NAMES = (
    *((f"{_ACTION}{letter}{_CALL}", op) for op, letter in LETTERS.items()),
    *((f"{_ACTION}{op[-4:].upper()}_{op[0].upper()}{_CALL}", op) for op in TRANSFERS),
    (rf"{_ACTION}REDUCE_GRAD\d*|all-grads-sync|grads-(?:reduce-scatter|all-reduce)", REDUCE),
    *((op, op) for op in (*TRANSFERS, *_MEGATRON)),
    ("forward-send-backward-recv", "forward-send+backward-recv"),
    ("backward-send-forward-recv", "backward-send+forward-recv"),
    *((f"Forward {_CALL}", FORWARD_COMPUTE), (f"Backward {_CALL}", BACKWARD_COMPUTE)),
    *((f"forward{_COMPUTE}", FORWARD_COMPUTE), (f"backward{_COMPUTE}", BACKWARD_COMPUTE)),
    (r"DistributedDataParallel\.forward|## forward ##|\w+\(F\)", FORWARD_COMPUTE),
    (r"## backward ##|\w+\([BW]\)", BACKWARD_COMPUTE),
    (r"optimizer-clip-main-grad|clip_grad\w*", "optimizer-clip-main-grad"),
    (
        r"Optimizer\.step#.*|optimizer(?:[-_. ]step)?|optimizer-inner-step|## optimizer ##",
        OPTIMIZER,
    ),
)
_FRAMEWORKS = tuple((re.compile(text, re.IGNORECASE), op) for text, op in _NAMES)
# Ranges that have a phase, and may be several or a part of a microbatch.
_PARTS = re.compile(
    r"DistributedDataParallel\.forward|## \w+ ##|\w+\([FBW]\)"
    r"|(?:forward|backward)(?:[-_ ]?(?:step|pass))?",
    re.IGNORECASE,
)
# Ranges in which the host waits for the next batch.
INPUT = re.compile(
    r"(?:enumerate\(DataLoader\)|load-data|.*(?:wait_for_batch|next_batch|get_batch|data_?load"
    r"|load[-_ ]?(?:data|batch)|copy_batch)).*",
    re.IGNORECASE,
)
_MARK = re.compile(r"ProfilerStep#(?P<step>\d+)")
_COUNTED = re.compile(
    r"(?!.*(?:micro|forward|backward))[^\d]{0,40}?(?:step|iteration|iter|batch)[\W_]{0,4}(?P<step>\d{1,9})"
    r"\W{0,4}",
    re.IGNORECASE,
)


def _number(digits: str | None, name: str, most: int = 2**16) -> int:
    """A number in the name of a range, at most `most`; -1 if there is none."""
    number = int((digits or "-1")[:20])
    if number > most:
        raise ValueError(
            f"The range `{quoted(name)}` has the number {quoted(digits)}, and no step, stage or "
            f"microbatch of its kind has one above {most:,}; give the meaning of ranges by "
            "`--names`."
        )
    return number


def read_range_names(path: Path) -> RangeNames:
    """Reads a TOML file (`kind = "ranges"`) that defines the meaning of ranges.

    **Raises:**

    `ValueError` for another file, an invalid regular expression, other groups than those above, or
    an unknown op or degree.
    """
    names = read_struct(path, "ranges", RangeNames)
    with located(shown(path)):
        for rule in names.ops:
            _check(rule.range, {"microbatch", "stage"}, set())
            if rule.op not in OPS:
                raise ValueError(unknown_name("op", rule.op, OPS))
        for rule in names.kernels:
            _check(rule.kernel, set(), set())
        if names.step is not None:
            _check(names.step, {"step"}, {"step"})
        if sorted(names.order) != ["cp", "dp", "pp", "tp"]:
            raise ValueError(
                f"`order` is {quoted(list(names.order))}; give tp, cp, dp and pp, the innermost "
                "first."
            )
    return names


def _check(text: str, allowed: set[str], needed: set[str]) -> None:
    try:
        groups = set(re.compile(text).groupindex)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"'{quoted(text)}' is not a regular expression ({quoted(str(error))}); correct it."
        ) from None
    if groups - allowed or needed - groups:
        raise ValueError(
            f"'{quoted(text)}' has the groups {sorted(groups) or 'none'}; allowed are "
            f"{', '.join(sorted(allowed))}."
        )


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

    def precedence(first: str, second: str) -> int:
        """Negative if workers start `first` before `second`; they may be far apart in time."""
        return int(np.sign(np.nansum(trace.start[first] - trace.start[second])))

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
    return {scope: (dp[members], pp[members]) for scope, members in chosen.items()}
