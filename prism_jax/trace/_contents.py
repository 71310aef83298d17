"""Summaries of the traces of a job's ranks: what is in them, and what can be learned from them; and
how each rank spends its steps: whose own work is long, what is hidden, and what is idle.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from .._misc import counted, quoted
from ._join_ranks import Clocks, set_clocks
from ._rank_ops import RankOps, rank_ops
from ._spans import Kind, RankTrace, Spans
from ._trace import BACKWARD_COMPUTE, COMPUTE, FORWARD_COMPUTE, OPTIMIZER, RangeNames


_MOST_NAMES = 100  # The most kernels that are listed.
_FEWEST_STEPS = 4  # As many as a fit needs.


@dataclasses.dataclass(frozen=True)
class KernelPool:
    """The calls of one kernel, over all ranks.

    **Attributes:**

    - `name`: its name in the profile.
    - `calls`, `total_s`, `median_s`: the number of calls, and their total and median time.
    - `cv`: the coefficient of variation of the time of a call.
    """

    name: str
    calls: int
    total_s: float
    median_s: float
    cv: float


@dataclasses.dataclass(frozen=True)
class Contents:
    """A summary of traces.

    **Attributes:**

    - `ranks`, `missing`: the ranks that have a trace, and those that have none.
    - `size`, `events`: the bytes of text, and the events by category.
    - `steps`, `step_time_s`: the number of steps, and their mean time on the first rank.
    - `ops`: the number of ops of each kind, on all ranks.
    - `microbatches`: the number of microbatches in a step of one rank; 0 if it is not known.
    - `kernels`, `on_device`: the kernels that took longest, and whether they ran on a device.
    - `streams`: the streams of one rank on which kernels ran.
    - `graph_launches`: the number of launches of CUDA graphs.
    - `clocks`: the offsets between the clocks of ranks.
    - `notes`, `tells`, `does_not_tell`: sentences: warnings, and what can and cannot be learned
        from the traces.
    """

    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    size: int
    events: dict[str, int]
    steps: int
    step_time_s: float
    ops: dict[str, int]
    microbatches: int
    kernels: tuple[KernelPool, ...]
    on_device: bool
    streams: int
    graph_launches: int
    clocks: Clocks
    notes: tuple[str, ...]
    tells: tuple[str, ...] = ()
    does_not_tell: tuple[str, ...] = ()


def contents(traces: Iterable[RankTrace], names: RangeNames | None = None) -> Contents:
    """Reads traces, one at a time, and summarises them.

    **Arguments:**

    - `traces`: the traces of the ranks of one job.
    - `names`: the meaning of the names of ranges; by default, those of PyTorch and Megatron-LM are
        known.
    """
    names = names or RangeNames()
    found: list[RankOps] = []
    events: collections.Counter[str] = collections.Counter()
    durations: dict[str, list[np.ndarray]] = {}
    size, world, streams, graphs, on_device = 0, 0, 0, 0, False
    for trace in traces:
        spans, size = trace.spans, size + trace.size
        events.update(trace.events)
        world = max(world, trace.world_size or 0)
        found.append(rank_ops(trace, names))
        device = spans[spans.kind == Kind.KERNEL]
        on_device |= bool(len(device))
        streams = max(streams, len(np.unique(device.lane)))
        graph = spans.named(lambda name: "GraphLaunch" in name)
        graphs += int(np.sum(graph & (spans.kind == Kind.LAUNCH)))
        _gather(durations, device if len(device) else spans[spans.kind == Kind.HOST_OP])
    ranks = tuple(sorted(ops.rank for ops in found))
    first = min(found, key=lambda ops: ops.rank)
    lengths = first.steps[:, 2] - first.steps[:, 1]
    forwards = (op.microbatch + 1 for op in first.ops if op.op == FORWARD_COMPUTE)
    partial = Contents(
        ranks=ranks,
        missing=tuple(sorted(set(range(world)) - set(ranks))),
        size=size,
        events=dict(events),
        steps=min((len(ops.steps) for ops in found), default=0),
        step_time_s=1e-9 * float(lengths.mean()) if len(lengths) else 0.0,
        ops=dict(collections.Counter(op.op for rank in found for op in rank.ops)),
        microbatches=max(forwards, default=0),
        kernels=_pools(durations),
        on_device=on_device,
        streams=streams,
        graph_launches=graphs,
        clocks=set_clocks(found),
        notes=tuple(note for ops in found for note in ops.notes),
    )
    tells, does_not_tell = _verdict(partial)
    return dataclasses.replace(partial, tells=tuple(tells), does_not_tell=tuple(does_not_tell))


def _gather(durations: dict[str, list[np.ndarray]], spans: Spans) -> None:
    order = np.argsort(spans.name, kind="stable")
    names, begins = np.unique(spans.name[order], return_index=True)
    parts = np.split((spans.end - spans.start)[order], begins[1:])
    for i, part in zip(names.tolist(), parts, strict=False):  # Without spans there is one part.
        if part.any():
            durations.setdefault(spans.names[i], []).append(part)


def _pools(durations: dict[str, list[np.ndarray]]) -> tuple[KernelPool, ...]:
    pools = []
    for name, parts in durations.items():
        seconds = 1e-9 * np.concatenate(parts)
        cv = float(seconds.std() / seconds.mean()) if seconds.mean() > 0 else 0.0
        pool = KernelPool(name, len(seconds), float(seconds.sum()), float(np.median(seconds)), cv)
        pools.append(pool)
    return tuple(sorted(pools, key=lambda pool: -pool.total_s)[:_MOST_NAMES])


def _verdict(c: Contents) -> tuple[list[str], list[str]]:
    """What can and cannot be learned from the traces."""
    where = "on the device" if c.on_device else "on the host, where no device was recorded"
    steps, missing = counted(c.steps, "step"), counted(len(c.missing), "rank")
    absent = [op for op in (FORWARD_COMPUTE, BACKWARD_COMPUTE) if not c.ops.get(op)]
    apart = "how far the clocks of ranks are apart: they share no collective"
    # Whether something can be learned; and what to say if it can, and if it cannot.
    sentences = (
        (c.kernels, f"the time of each kernel {where}, and how it varies between calls", ""),
        (
            c.steps >= _FEWEST_STEPS,
            f"how {counted(c.steps, 'step')} differ",
            f"how steps differ: there are {steps}, and a fit needs {_FEWEST_STEPS}",
        ),
        (
            not absent,
            f"the compute of {counted(c.microbatches, 'microbatch', 'es')} of a step on each rank",
            f"the step of a training job: no range is `{'` or `'.join(absent)}`, so that this is "
            "inference, or its names must be given with --names",
        ),
        (absent or c.ops.get(OPTIMIZER), "", "when the optimizer runs: no range has its name"),
        (len(c.ranks) > 1, "", "how ranks differ and what they wait for: there is one rank"),
        (
            c.clocks.matched,
            f"what {len(c.ranks)} ranks wait for, by {counted(c.clocks.matched, 'collective')}",
            apart if len(c.ranks) > 1 else "",
        ),
        (
            not c.missing,
            "",
            f"anything of {missing} without a file: {quoted(', '.join(map(str, c.missing)))}",
        ),
        (
            not c.graph_launches,
            "",
            f"what the host does for the kernels of {counted(c.graph_launches, 'launch')} of CUDA "
            "graphs: each graph is launched at once",
        ),
    )
    tells = [told for known, told, _ in sentences if known and told]
    return tells, [not_told for known, _, not_told in sentences if not known and not_told]


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
    found = [_of_rank(trace, names or RangeNames()) for trace in ranks]
    common = sorted(set[int].intersection(*({*one.steps.tolist()} for one in found)))
    if len(common) < 4:
        raise ValueError(
            f"The traced ranks have {counted(len(common), 'step')} in common, and a comparison "
            "needs 4; record the same steps on all ranks, each in a range such as `ProfilerStep#7`."
        )
    columns = [field.name for field in dataclasses.fields(RankTimes)][1:]
    chosen = [np.searchsorted(one.steps, common) for one in found]
    return [
        RankTimes(one.rank, *(getattr(one, name)[steps] for name in columns))
        for one, steps in zip(found, chosen, strict=True)
    ]


def step_times(times: Sequence[RankTimes]) -> Float[np.ndarray, " steps"]:
    """How long each step takes on the rank on which it takes longest, in seconds."""
    return np.max([one.step_s for one in times], axis=0)


def _of_rank(trace: RankTrace, names: RangeNames) -> RankTimes:
    spans, ops = trace.spans, rank_ops(trace, names)
    number, start, end = ops.steps.T
    compute = [(op.step, op.start, op.end) for op in ops.ops if op.op in COMPUTE]
    of_step, *parts = np.array(compute or ops.steps, np.int64).T
    on_device = spans.kind == Kind.KERNEL
    of_message = np.array([m.name in _NEVER_HIDDEN for m in spans.messages] or [False])
    if on_device.any():
        computes, talks = on_device & (spans.message < 0), on_device & (spans.message >= 0)
    else:
        computes = (spans.kind == Kind.HOST_OP) & ~spans.waits()
        talks = spans.kind == Kind.MESSAGE
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
