"""Which of a rank's ranges are ops: by names, as frameworks write them or a file defines them, and
microbatches without names by the repeated pattern of host operators.
"""

import dataclasses
import itertools as it
import re
from collections.abc import Sequence

import msgspec
import numpy as np

from .._files import Path, shown
from .._misc import quoted, unknown_name
from ..data import convert, located, read_toml
from ._spans import Kind, RankOp, Spans
from ._trace import BACKWARD_COMPUTE, FORWARD_COMPUTE, LETTERS, OPS, OPTIMIZER, REDUCE, TRANSFERS


class RangeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule for ranges that are ops of one kind.

    **Attributes:**

    - `range`: a regular expression that must match the whole name. Its groups `microbatch` and
        `stage` are read, if it has them; otherwise microbatches are counted in the order of time.
    - `op`: the kind of op.
    """

    range: str
    op: str


class RangeNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to read the names of ranges.

    **Attributes:**

    - `ops`: the rules, of which the first that matches is used.
    - `step`: a regular expression with a group `step` for the range of a step.
    - `order`: the order of ranks, the innermost degree of parallelism first.
    """

    ops: tuple[RangeRule, ...] = ()
    step: str = r"ProfilerStep#(?P<step>\d+)"
    order: tuple[str, ...] = ("tp", "cp", "dp", "pp")

    def op_of(self, name: str) -> tuple[str, int, int] | None:
        """The kind, the microbatch and the stage of an op; -1 for what its name does not say."""
        for text, op in (*((rule.range, rule.op) for rule in self.ops), *_FRAMEWORKS):
            if found := re.fullmatch(text, name):
                groups = found.groupdict()
                number, stage = (_number(groups.get(g), name) for g in ("microbatch", "stage"))
                return op, number, stage
        return None

    def step_of(self, name: str) -> int | None:
        found = re.fullmatch(self.step, name)
        return _number(found["step"], name, 2**31) if found else None


_ACTION, _CALL = r"PP:(?P<stage>\d+)", r"(?P<microbatch>\d+)"
_COMPUTE = rf"[-_ ]?(?:compute|step|pass)?(?:[-_ #]{_CALL})?"
_MEGATRON = ("params-all-gather", "embedding-grads-all-reduce", "layernorm-grads-all-reduce")
# `PP:2F7` are the actions of torch.distributed.pipelining's schedules, `Forward 7` those of its
# GPipe; `forward-compute` and such are the timers of Megatron-LM. Two ops in one exchange have a
# `+` between them.
_FRAMEWORKS = (
    *((f"{_ACTION}{letter}{_CALL}", op) for op, letter in LETTERS.items()),
    *((f"{_ACTION}{op[-4:].upper()}_{op[0].upper()}{_CALL}", op) for op in TRANSFERS),
    (rf"{_ACTION}REDUCE_GRAD\d*|all-grads-sync|grads-(?:reduce-scatter|all-reduce)", REDUCE),
    *((op, op) for op in (*TRANSFERS, *_MEGATRON)),
    ("forward-send-backward-recv", "forward-send+backward-recv"),
    ("backward-send-forward-recv", "backward-send+forward-recv"),
    *((f"Forward {_CALL}", FORWARD_COMPUTE), (f"Backward {_CALL}", BACKWARD_COMPUTE)),
    *((f"forward{_COMPUTE}", FORWARD_COMPUTE), (f"backward{_COMPUTE}", BACKWARD_COMPUTE)),
    (r"DistributedDataParallel\.forward", FORWARD_COMPUTE),
    (r"optimizer-clip-main-grad|clip_grad\w*", "optimizer-clip-main-grad"),
    (r"Optimizer\.step#.*|optimizer(?:[-_.]step)?|optimizer-inner-step", OPTIMIZER),
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
    names = convert(read_toml(path, "ranges"), RangeNames, lambda key: shown(path))
    with located(shown(path)):
        for rule in names.ops:
            _check(rule.range, {"microbatch", "stage"}, set())
            if rule.op not in OPS:
                raise ValueError(unknown_name("op", rule.op, OPS))
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


# A run with less than this share of a microbatch's operators is not a microbatch.
_NOISE = 0.5
# A cut between two microbatches is moved to an exchange within this distance, in microbatches. Any
# operators before an exchange at its start, or after one at its end, are as few.
_NEAR, _EDGE = 0.4, 0.2


@dataclasses.dataclass
class _Run:
    """Consecutive operators of one kind; `cuts` are the positions among them of exchanges of the
    host.
    """

    op: str
    spans: list[tuple[int, int]]
    cuts: list[int]

    def inner(self, low: int, high: int) -> tuple[int, int]:
        """A microbatch's operators, without those that an exchange separates from most of them."""
        edge = _EDGE * (high - low)
        first = max((cut for cut in self.cuts if low < cut <= low + edge), default=low)
        return first, min((cut for cut in self.cuts if high - edge <= cut < high), default=high)


def ops_of_pattern(
    spans: Spans, start: int, end: int, known: Sequence[RankOp], num_microbatches: int
) -> list[RankOp]:
    """The forwards and backwards of a step; empty if they cannot be found.

    Autograd nodes are backwards; all other operators of the host, except those within the `known`
    ranges, are forwards. Microbatches have about equally many operators, so long runs of one kind
    belong to several of the `num_microbatches` that the rank runs in a step, on all of its stages.
    """
    found: list[RankOp] = []
    runs = _runs(spans, start, end, known)
    for op in (FORWARD_COMPUTE, BACKWARD_COMPUTE):
        total = sum(len(run.spans) for run in runs if run.op == op)
        runs = _without_noise(runs, op, _NOISE * total / num_microbatches)
    for op in (FORWARD_COMPUTE, BACKWARD_COMPUTE):
        mine = [run for run in runs if run.op == op]
        each = sum(len(run.spans) for run in mine) / num_microbatches
        numbers = [round(len(run.spans) / each) for run in mine]
        if sum(numbers) != num_microbatches or 0 in numbers:
            return []
        for run, pieces in zip(mine, numbers, strict=True):
            for low, high in it.starmap(run.inner, it.pairwise(_cuts(run, pieces))):
                first, last = run.spans[low][0], max(e for _, e in run.spans[low:high])
                found.append(RankOp(-1, op, -1, -1, first, last))
    return found


def _runs(spans: Spans, start: int, end: int, known: Sequence[RankOp]) -> list[_Run]:
    kinds = np.isin(spans.kind, (Kind.HOST_OP, Kind.BACKWARD, Kind.MESSAGE))
    mine = spans[kinds & (spans.start >= start) & (spans.start < end)]
    waits = mine.waits() | (mine.kind == Kind.MESSAGE)
    outermost: dict[int, int] = {}
    runs: list[_Run] = []
    others = sorted((op.start, op.end) for op in known)
    for i in np.lexsort((-mine.end, mine.start)).tolist():
        low, high, lane = int(mine.start[i]), int(mine.end[i]), int(mine.lane[i])
        if waits[i]:  # It may last while other ops run.
            if runs:
                runs[-1].cuts.append(len(runs[-1].spans))
            continue
        inside = high <= outermost.get(lane, low - 1)
        outermost[lane] = max(high, outermost.get(lane, low))
        if inside or any(a <= low < b for a, b in others):
            continue
        op = BACKWARD_COMPUTE if mine.kind[i] == Kind.BACKWARD else FORWARD_COMPUTE
        if not runs or runs[-1].op != op:
            runs.append(_Run(op, [], []))
        runs[-1].spans.append((low, high))
    return runs


def _without_noise(runs: list[_Run], op: str, fewest: float) -> list[_Run]:
    """The runs without short runs of a kind; the runs around these are merged."""
    kept: list[_Run] = []
    for run in runs:
        if run.op == op and len(run.spans) < fewest:
            continue
        if kept and kept[-1].op == run.op:
            before = len(kept[-1].spans)
            spans, cuts = kept[-1].spans + run.spans, [before + cut for cut in run.cuts]
            kept[-1] = _Run(run.op, spans, [*kept[-1].cuts, before, *cuts])
        else:
            kept.append(run)
    return kept


def _cuts(run: _Run, pieces: int) -> list[int]:
    """Where the microbatches of a run begin and end."""
    each = len(run.spans) / pieces
    cuts = [0]
    for i in range(1, pieces):
        near = [cut for cut in run.cuts if abs(cut - i * each) <= _NEAR * each]
        cuts.append(min(near, key=lambda cut: abs(cut - i * each)) if near else round(i * each))
    return [*cuts, len(run.spans)]
