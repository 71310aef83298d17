"""The meaning of named ranges, as frameworks write them or as a file defines it."""

import os
import re
from typing import NamedTuple

import msgspec

from .._files import shown
from .._misc import quoted, unknown_name
from ..data import convert, read_toml
from ._trace import PIPELINED, SCOPES


# Kinds of ops that a range may stand for.
KNOWN = (*PIPELINED, *SCOPES)


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


# `PP:2F7` are the actions of torch.distributed.pipelining's schedules, `Forward 7` those of its
# GPipe; `forward-compute` and such are the timers of Megatron-LM. Two ops in one exchange have a
# `+` between them.
_FRAMEWORKS = (
    (r"PP:(?P<stage>\d+)F(?P<microbatch>\d+)", "forward-compute"),
    (r"PP:(?P<stage>\d+)B(?P<microbatch>\d+)", "backward-compute"),
    (r"PP:(?P<stage>\d+)I(?P<microbatch>\d+)", "backward-input"),
    (r"PP:(?P<stage>\d+)W(?P<microbatch>\d+)", "backward-weight"),
    (r"PP:(?P<stage>\d+)REDUCE_GRAD\d*", "grads-reduce-scatter"),
    (r"PP:(?P<stage>\d+)SEND_F(?P<microbatch>\d+)", "forward-send"),
    (r"PP:(?P<stage>\d+)RECV_F(?P<microbatch>\d+)", "forward-recv"),
    (r"PP:(?P<stage>\d+)SEND_B(?P<microbatch>\d+)", "backward-send"),
    (r"PP:(?P<stage>\d+)RECV_B(?P<microbatch>\d+)", "backward-recv"),
    (r"forward-send", "forward-send"),
    (r"forward-recv", "forward-recv"),
    (r"backward-send", "backward-send"),
    (r"backward-recv", "backward-recv"),
    (r"forward-send-backward-recv", "forward-send+backward-recv"),
    (r"backward-send-forward-recv", "backward-send+forward-recv"),
    (r"Forward (?P<microbatch>\d+)", "forward-compute"),
    (r"Backward (?P<microbatch>\d+)", "backward-compute"),
    (r"forward[-_ ]?(?:compute|step|pass)?(?:[-_ #](?P<microbatch>\d+))?", "forward-compute"),
    (r"backward[-_ ]?(?:compute|step|pass)?(?:[-_ #](?P<microbatch>\d+))?", "backward-compute"),
    (r"DistributedDataParallel\.forward", "forward-compute"),
    (r"all-grads-sync|grads-(?:reduce-scatter|all-reduce)", "grads-reduce-scatter"),
    (r"params-all-gather", "params-all-gather"),
    (r"embedding-grads-all-reduce", "embedding-grads-all-reduce"),
    (r"layernorm-grads-all-reduce", "layernorm-grads-all-reduce"),
    (r"optimizer-clip-main-grad|clip_grad\w*", "optimizer-clip-main-grad"),
    (r"Optimizer\.step#.*|optimizer(?:[-_.]step)?|optimizer-inner-step", "optimizer"),
)


class Named(NamedTuple):
    """The meaning of a range; -1 for a number that its name does not contain."""

    op: str
    microbatch: int
    stage: int


class Reader:
    """Looks up the meaning of names, each name once."""

    def __init__(self, names: RangeNames | None = None):
        names = names or RangeNames()
        given = [(rule.range, rule.op) for rule in names.ops]
        self.order = names.order
        self._rules = [(re.compile(text), op) for text, op in (*given, *_FRAMEWORKS)]
        self._step = re.compile(names.step)
        self._known: dict[str, Named | None] = {}

    def op(self, name: str) -> Named | None:
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def step(self, name: str) -> int | None:
        found = self._step.fullmatch(name)
        return int(found["step"]) if found else None

    def _find(self, name: str) -> Named | None:
        for rule, op in self._rules:
            if found := rule.fullmatch(name):
                groups = found.groupdict()
                number, stage = (groups.get(g) for g in ("microbatch", "stage"))
                return Named(op, int(number) if number else -1, int(stage) if stage else -1)
        return None


def read_range_names(path: str | os.PathLike[str]) -> RangeNames:
    """Reads a TOML file (`kind = "ranges"`) that defines the meaning of ranges.

    **Raises:**

    `ValueError` for another file, an invalid regular expression, other groups than those above, or
    an unknown op or degree.
    """
    names = convert(read_toml(path, "ranges"), RangeNames, lambda key: shown(path))
    for rule in names.ops:
        _check(path, rule.range, {"microbatch", "stage"}, set())
        if rule.op not in KNOWN:
            raise ValueError(f"{shown(path)}: {unknown_name('op', rule.op, KNOWN)}")
    _check(path, names.step, {"step"}, {"step"})
    if sorted(names.order) != ["cp", "dp", "pp", "tp"]:
        raise ValueError(
            f"{shown(path)}: `order` is {quoted(list(names.order))}; give tp, cp, dp and pp, the "
            "innermost first."
        )
    return names


def _check(path, text: str, allowed: set[str], needed: set[str]) -> None:
    try:
        groups = set(re.compile(text).groupindex)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{shown(path)}: '{quoted(text)}' is not a regular expression ({quoted(str(error))}); "
            "correct it."
        ) from None
    if groups - allowed or needed - groups:
        raise ValueError(
            f"{shown(path)}: '{quoted(text)}' has the groups {sorted(groups) or 'none'}; allowed "
            f"are {', '.join(sorted(allowed))}."
        )
