"""Compares the ranks of a traced job: whose own work is long, what is hidden, and what is idle."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from ._ranges import RangeNames, Reader
from ._rank_ops import rank_ops
from ._spans import HOST_OP, KERNEL, MESSAGE, WAITING, RankTrace, Spans
from ._trace import COMPUTE


# Exchanges between two stages wait for these; compute cannot hide them.
_NEVER_HIDDEN = ("send", "recv", "send_recv", "barrier")


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """How a rank spends its steps, in seconds of each step.

    **Attributes:**

    - `rank`, `steps`: the rank, and the numbers of its steps.
    - `step_s`: how long each step takes.
    - `own_s`: the forwards and backwards, or the whole step if no names tell these, without the
        time in which the rank only communicates. Barriers make the steps of all ranks equally long,
        but not this: the rank that the others wait for has the longest.
    - `communication_s`, `exposed_s`: its collectives that could overlap with compute, and their
        part that does not.
    - `idle_s`: the part in which its device neither computes nor communicates; zero without one.
    """

    rank: int
    steps: Int[np.ndarray, " steps"]
    step_s: Float[np.ndarray, " steps"]
    own_s: Float[np.ndarray, " steps"]
    communication_s: Float[np.ndarray, " steps"]
    exposed_s: Float[np.ndarray, " steps"]
    idle_s: Float[np.ndarray, " steps"]


def rank_times(ranks: Iterable[RankTrace], names: RangeNames | None = None) -> list[RankTimes]:
    """How each rank spends the steps that all of them have. Kernels of a device count, or else
    operators of the host.

    **Arguments:**

    - `ranks`: from `read_ranks`.
    - `names`: the meaning of the names of ranges, as of `read_profile_traces`.

    **Raises:**

    `ValueError` if a rank has no ranges of steps, or there are fewer than four common steps.
    """
    found = [_of_rank(trace, Reader(names)) for trace in ranks]
    common = sorted(set[int].intersection(*({*one.steps.tolist()} for one in found)))
    if len(common) < 4:
        raise ValueError(
            f"The traced ranks have {len(common)} steps in common, and a comparison needs 4; "
            "record the same steps on all ranks, each in a range such as `ProfilerStep#7`."
        )
    return [_at(one, common) for one in found]


def _at(times: RankTimes, steps: list[int]) -> RankTimes:
    """Only some of the steps, which are sorted."""
    chosen = np.searchsorted(times.steps, steps)
    columns = [f.name for f in dataclasses.fields(times)][1:]
    return RankTimes(times.rank, **{name: getattr(times, name)[chosen] for name in columns})


def step_times(times: Sequence[RankTimes]) -> Float[np.ndarray, " steps"]:
    """How long each step takes on the rank on which it takes longest, in seconds."""
    return np.max([one.step_s for one in times], axis=0)


def _of_rank(trace: RankTrace, reader: Reader) -> RankTimes:
    spans, ops = trace.spans, rank_ops(trace, reader)
    number, start, end = ops.steps.T
    compute = [(op.step, op.start, op.end) for op in ops.ops if op.op in COMPUTE]
    of_step, *parts = np.array(compute or ops.steps, np.int64).T
    on_device = spans.kind == KERNEL
    of_message = np.array([m.name in _NEVER_HIDDEN for m in spans.messages] or [False])
    if on_device.any():
        computes, talks = on_device & (spans.message < 0), on_device & (spans.message >= 0)
    else:
        waits = np.array([name.startswith(WAITING) for name in spans.names] or [False])
        computes, talks = (spans.kind == HOST_OP) & ~waits[spans.name], spans.kind == MESSAGE
    hideable = talks & ~of_message[spans.message]

    def within(chosen: Bool[np.ndarray, " spans"], start, end) -> Float[np.ndarray, " windows"]:
        covered = _covered(spans, chosen)
        return covered(end) - covered(start)

    waits = within(computes | talks, *parts) - within(computes, *parts)
    own = (parts[1] - parts[0]) * 1e-9 - waits
    step, busy = (end - start) * 1e-9, within(computes, start, end)
    return RankTimes(
        trace.rank or 0,
        number,
        step_s=step,
        own_s=np.bincount(np.searchsorted(number, of_step), own, len(number)),
        communication_s=within(hideable, start, end),
        exposed_s=within(computes | hideable, start, end) - busy,
        idle_s=(step - within(computes | talks, start, end)) * bool(on_device.any()),
    )


def _covered(
    spans: Spans, chosen: Bool[np.ndarray, " spans"]
) -> Callable[[Int[np.ndarray, " times"]], Float[np.ndarray, " times"]]:
    """How many seconds before a time lie in any of some spans."""
    order = np.argsort(spans.start[chosen], kind="stable")
    start, end = spans.start[chosen][order], np.maximum.accumulate(spans.end[chosen][order])
    if not len(start):
        return lambda times: np.zeros(len(times))
    begins = np.append(True, start[1:] > end[:-1])
    start, end = start[begins], end[np.append(begins[1:], True)]
    edges = np.stack([start, end], axis=1).reshape(-1)
    seconds = np.repeat(np.append(0, np.cumsum(end - start)), 2)[1:-1] * 1e-9
    first = edges[0]  # Nanoseconds of a clock have more digits than floats.
    return lambda times: np.interp((times - first).astype(float), (edges - first) * 1.0, seconds)
