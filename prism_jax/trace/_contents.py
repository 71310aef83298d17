"""Summaries of the traces of a job's ranks: where the time of a step goes, what is in them, and
what can be learned from them.
"""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from .._misc import plural, quoted
from ._join_ranks import Clocks, set_clocks
from ._rank_ops import RankOps, ops_of_work
from ._spans import Kind, RankTrace
from ._steps import Steps, steps_of
from ._trace import FORWARD_COMPUTE, RangeNames
from ._where import RankWhere, kind_of, rank_where
from ._work import COMPUTES, COPIES, TALKS, Work, work_of


_MOST_NAMES = 100  # The most kernels that are listed.
_FEWEST_STEPS = 4  # As many as a fit needs.


@dataclasses.dataclass(frozen=True)
class KernelPool:
    """The calls of one kernel in the steps of all ranks; of a rank without steps, all of its calls.

    **Attributes:**

    - `name`: its name in the profile.
    - `calls`, `total_s`, `median_s`: the number of calls, and their total and median time.
    - `cv`: the coefficient of variation of the time of a call.
    - `kind`: what it does, as in `RankWhere`, or `communication` or `copy`.
    """

    name: str
    calls: int
    total_s: float
    median_s: float
    cv: float
    kind: str


@dataclasses.dataclass(frozen=True)
class Contents(RankWhere):
    """A summary of traces: where the time of the rank with the median step time goes, and:

    **Attributes:**

    - `ranks`, `missing`: the ranks that have a trace, and those that have none.
    - `size`, `events`: the bytes of text, and the events by category.
    - `training`: whether it is of training; `None` if nothing tells.
    - `steps`: the number of whole steps that all ranks have.
    - `by_rank`: where the time of each rank goes, if there are several.
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
    training: bool | None
    steps: int
    by_rank: tuple[RankWhere, ...]
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
    - `names`: the meaning of the names of ranges; by default, those of PyTorch, TorchRec and
        Megatron-LM are known.
    """
    names = names or RangeNames()
    ops_of_ranks: list[RankOps] = []
    where: list[RankWhere] = []
    training: list[bool | None] = []
    events: collections.Counter[str] = collections.Counter()
    durations: dict[tuple[str, str], list[np.ndarray]] = {}
    size, world, streams, graphs, on_device = 0, 0, 0, 0, False
    for trace in traces:
        spans, size = trace.spans, size + trace.size
        events.update(trace.events)
        world = max(world, trace.world_size or 0)
        work = work_of(spans, names)
        ops_of_ranks.append(ops_of_work(trace, work, steps_of(spans, work, names)))
        where.append(rank_where(ops_of_ranks[-1], spans, work))
        training.append(work.training)
        on_device |= work.on_device
        streams = max(streams, len(np.unique(spans.lane[spans.kind == Kind.KERNEL])))
        graph = spans.named(lambda name: "GraphLaunch" in name)
        graphs += int(np.sum(graph & (spans.kind == Kind.LAUNCH)))
        _gather(durations, work, ops_of_ranks[-1].steps, spans.names)
    ranks = tuple(sorted(ops.rank for ops in ops_of_ranks))
    first = min(ops_of_ranks, key=lambda ops: ops.rank)
    forwards = (op.microbatch + 1 for op in first.ops if op.op == FORWARD_COMPUTE)
    by_rank = sorted(where, key=lambda rank: rank.rank)
    middle = sorted(by_rank, key=lambda rank: rank.step_time_s)[(len(by_rank) - 1) // 2]
    pools = _pools(durations)
    partial = Contents(
        **vars(middle),
        ranks=ranks,
        missing=tuple(sorted(set(range(world)) - set(ranks))),
        size=size,
        events=dict(events),
        training=next((x for x in (True, False) if x in training), None),
        steps=min((len(ops.steps) for ops in ops_of_ranks), default=0),
        by_rank=tuple(by_rank) if len(by_rank) > 1 else (),
        ops=dict(collections.Counter(op.op for rank in ops_of_ranks for op in rank.ops)),
        microbatches=max(forwards, default=0),
        kernels=tuple(pools[:_MOST_NAMES]),
        on_device=on_device,
        streams=streams,
        graph_launches=graphs,
        clocks=set_clocks(ops_of_ranks),
        notes=tuple(note for ops in ops_of_ranks for note in ops.notes),
    )
    tells, does_not_tell = _verdict(partial, any(ops.by_runs for ops in ops_of_ranks))
    return dataclasses.replace(partial, tells=tuple(tells), does_not_tell=tuple(does_not_tell))


def _gather(
    durations: dict[tuple[str, str], list[np.ndarray]],
    work: Work,
    steps: Steps,
    names: tuple[str, ...],
) -> None:
    """Adds the nanoseconds of the calls of each kernel in the steps, by its name and kind."""
    chosen = np.flatnonzero((steps.of_kernels(work) >= 0) | (len(steps) == 0))
    keys = work.activity[chosen] * len(names) + work.name[chosen]
    order = np.argsort(keys, kind="stable")
    distinct, begins = np.unique(keys[order], return_index=True)
    parts = np.split((work.end - work.start)[chosen[order]], begins[1:])
    for key, lasts in zip(distinct.tolist(), parts, strict=False):
        activity, name = divmod(key, len(names))
        if lasts.any():
            kind = {TALKS: "communication", COPIES: "copy", COMPUTES: kind_of(names[name])}[
                activity
            ]
            durations.setdefault((names[name], kind), []).append(lasts)


def _pools(durations: dict[tuple[str, str], list[np.ndarray]]) -> list[KernelPool]:
    pools = []
    for (name, kind), parts in durations.items():
        lasts = np.concatenate(parts)
        figures = 1e-9 * float(lasts.sum()), 1e-9 * float(np.median(lasts))
        cv = float(lasts.std() / lasts.mean())
        pools.append(KernelPool(name, len(lasts), *figures, cv, kind))
    return sorted(pools, key=lambda pool: -pool.total_s)


def _verdict(c: Contents, by_runs: bool) -> tuple[list[str], list[str]]:
    """What can and cannot be learned from the traces; `by_runs` as in `RankOps`."""
    where = "on the device" if c.on_device else "on the host, where no device was recorded"
    steps, missing = plural(c.steps, "step"), plural(len(c.missing), "rank")
    apart = "how far the clocks of ranks are apart: they share no collective"
    graphs = plural(c.graph_launches, "launch", "es")
    phases = "the phases of a step: the host's operators and ranges are not in it"
    if c.graph_launches and c.phases is None:
        phases = "forward and backward: one graph holds the whole step, so its phases are not known"
    elif c.training is False:
        phases = (
            "the step of a training job: no backward and no optimizer runs, so this is inference"
        )
    # Whether something can be learned; and what to say if it can, and if it cannot.
    sentences = (
        (c.kernels, f"the time of each kernel {where}, and how it varies between calls", ""),
        (
            c.steps >= _FEWEST_STEPS,
            f"how {steps} differ"
            + (f"; {plural(c.warm_up, 'step')} before these had a warm-up" if c.warm_up else ""),
            f"how steps differ: there {'is' if c.steps == 1 else 'are'} {steps}, and a fit needs "
            f"{_FEWEST_STEPS}",
        ),
        (
            c.training and c.phases,
            f"the compute of {plural(c.microbatches, 'microbatch', 'es')} of a step on each rank",
            phases,
        ),
        (
            not c.phases or not c.training or not by_runs,
            "",
            "microbatches whose forwards or backwards follow one another: neither ranges nor "
            "autograd's arrows tell them apart, so they count as one",
        ),
        (
            not c.phases or not c.training or c.phases["optimizer"],
            "",
            "when the optimizer runs: no range has its name",
        ),
        (
            c.steps or not c.split,
            "",
            "where steps begin: neither ranges nor optimizers bound them, so that the whole "
            "recording counts",
        ),
        (len(c.ranks) > 1, "", "how ranks differ and what they wait for: there is one rank"),
        (
            c.clocks.matched,
            f"what {len(c.ranks)} ranks wait for, by {plural(c.clocks.matched, 'collective')}",
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
            f"what the host does for the kernels of {graphs} of CUDA graphs: each graph is "
            "launched at once",
        ),
    )
    tells = [told for known, told, _ in sentences if known and told]
    return tells, [not_told for known, _, not_told in sentences if not known and not_told]
