"""The graph of a whole traced job: the pipelines of all replicas, and the ops around them; the
latencies of a trace on it, as arrays by kind; and replays of its steps.
"""

import dataclasses
import itertools as it
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from ..data import Call, Job, Outline
from ..schedule import (
    OVERLAPPED,
    SEND_RECV,
    AbstractSchedule,
    OpGraph,
    op_graph,
    order_of,
    replay as replay_graph,
)
from ..trace import COMPUTE, LETTERS, Trace, groups, stages_of_ranks


LAUNCH = "launch "  # The time of a worker before an op that runs once.
CONSTANT = "constant "  # Before the kind of the op that it is a part of, such as a sleep.
PIPELINE = "pipeline"
SLOW_LINK = " slow link"  # For send_recvs between nodes, if a trace shows them.

# Values of ops by kind; `nan` where a worker has no such op. An op of several workers is at the
# first of them, and one that runs once at microbatch 0. Axes along which values are alike may have
# a length of one.
ByKind = dict[str, Float[np.ndarray, "_replicas _stages _microbatches _steps"]]


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A graph whose ranks are the workers of a job (`dp_rank * pp + stage`).

    **Attributes:**

    - `graph`: the ops. Microbatches are numbered consecutively over all replicas. The phase of an
        op that is not of the pipeline is its kind.
    - `kind`: the kind of each op, as in traces; `forward-send_recv`, `backward-send_recv`;
        `launch ...` for the time before an op that runs once. If ranks have several stages, with
        the number of the stage on its rank, as `forward-compute 1`; for a send_recv over slow links
        with `slow link`.
    - `op`: the op of a trace that ends when this op ends or, for a launch, that starts then; for a
        send_recv, `forward` or `backward`.
    - `calls`: for each member, the number of its call in a trace.
    - `call`: the microbatch within its replica, 0 for ops that run once.
    - `members`: the workers that run an op together, or the single worker.
    - `twin`: whether a send_recv shares its exchange with the one before it, which has the latency.
    - `computes`: whether an op computes.
    - `phases`: the kinds of compute: forwards first, stage after stage.
    - `ops`, `places`: the ops of each kind, and the replica, the stage and the microbatch of each.
    """

    graph: OpGraph
    kind: tuple[str, ...]
    op: tuple[str, ...]
    calls: tuple[tuple[int, ...], ...]
    call: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    twin: tuple[bool, ...]
    computes: Bool[np.ndarray, " ops"]
    phases: tuple[str, ...]
    ops: dict[str, np.ndarray]
    places: dict[str, tuple[np.ndarray, ...]]

    def by_kind(self, values: Float[np.ndarray, "ops steps"]) -> ByKind:
        """The values of ops by kind."""
        stages, arrays = int(self.graph.stage.max()) + 1, {}
        for kind, place in self.places.items():
            microbatches = int(place[2].max()) + 1
            shape = (len(self.graph.last) // stages, stages, microbatches, values.shape[1])
            arrays[kind] = np.full(shape, np.nan)
            arrays[kind][place] = values[self.ops[kind]]
        return arrays

    def by_op(self, values: ByKind) -> Float[np.ndarray, "ops steps"]:
        """The values of ops in the order of the graph."""
        by_op = np.empty((self.graph.num_ops, next(iter(values.values())).shape[3]))
        for kind, place in self.places.items():
            by_op[self.ops[kind]] = values[kind][place]
        return by_op


def step_graph(
    job: Job, outline: Outline, *, constants: Collection[tuple[str, int]] = ()
) -> StepGraph:
    """Builds the graph of all replicas of a job.

    **Arguments:**

    - `job`: a job with its layout and schedule.
    - `outline`: the ops of workers before and after the pipeline.
    - `constants`: kinds of compute on workers that have a constant part, which is another op before
        each of theirs. Its kind begins with `constant`. It waits for what the op would wait for,
        and is not compute.

    **Raises:**

    `ValueError` for a schedule with pairs of overlapped ops or several chains of stages.
    """
    schedule = order_of(job.schedule, job.layout)
    # As recorded: a transfer is an op of both of its workers, if the order allows it.
    blocking = job.schedule.blocking
    if blocking is None:
        # Sends and receives may block compute with one stage per rank and whole backwards.
        split = any("I" in token for order in schedule.orders() for token in order)
        blocking = schedule.num_stages == schedule.num_ranks and not split
    pipeline = op_graph(schedule, blocking=blocking)
    if OVERLAPPED in pipeline.phase or len(schedule.chain_starts) > 1:
        raise ValueError(
            f"Job `{job.name}` runs `{job.schedule.kind}`; only traces of forwards and backwards "
            "by themselves, on one chain of stages, can be read."
        )
    nodes = _Nodes(job, schedule, pipeline, outline, constants)
    nodes.add_calls(outline.before)
    nodes.add_launches()
    # The ops in which replicas wait for one another.
    dp = job.layout.dp
    for replicas in [range(dp)] if outline.gathered else [[d] for d in range(dp)]:
        nodes.add_pipelines(replicas)
    nodes.add_calls(outline.after)
    return nodes.finished()


_NAMES = {letter: op for op, letter in LETTERS.items()}


class _Node(NamedTuple):
    """An op: what a `StepGraph` and an `OpGraph` have of it."""

    kind: str
    members: tuple[int, ...]
    predecessors: tuple[int, ...]
    op: str
    calls: tuple[int, ...]
    phase: str = ""
    call: int = 0
    microbatch: int = -1
    peer: int = -1
    twin: bool = False


class _Nodes:
    """Nodes in the order of addition, each after all nodes that it waits for."""

    def __init__(
        self,
        job: Job,
        schedule: AbstractSchedule,
        pipeline: OpGraph,
        outline: Outline,
        constants: Collection[tuple[str, int]],
    ):
        self.shape = dp, pp = job.layout.dp, job.layout.pp
        self.nodes: list[_Node] = []
        self.done: list[tuple[int, ...]] = [()] * (dp * pp)  # The last ops of each worker.
        self.orders: list[list[int]] = [[] for _ in range(dp * pp)]
        self.pipeline, self.num_microbatches = pipeline, schedule.num_microbatches
        columns = pipeline.phase, pipeline.stage, pipeline.microbatch, pipeline.rank, pipeline.peer
        self.ops = list(zip(*(column.tolist() for column in columns), strict=True))
        self.gathered, self.constants = outline.gathered, constants
        self.slow_links = {frozenset(pair) for pair in outline.slow_links}
        ranks = stages_of_ranks(schedule.stage_to_rank, schedule.num_ranks)
        self.local = {stage: number for stages in ranks for number, stage in enumerate(stages)}
        self.several = schedule.num_stages > schedule.num_ranks

    def add(self, kind: str, members: tuple[int, ...], waits: Iterable[int], **fields: Any) -> int:
        """Adds a node, and returns its number. One without a phase is the last of its workers."""
        fields = {"op": kind.removeprefix(LAUNCH), "calls": (0,) * len(members), **fields}
        node = _Node(kind, members, tuple(sorted(set(waits))), **fields)
        self.nodes.append(node)
        number = len(self.nodes) - 1
        if not node.phase:
            for member in members:
                self.done[member] = (number,)
        return number

    def add_calls(self, calls: Sequence[Call]) -> None:
        dp, pp = self.shape
        for call in calls:
            before, callers = list(self.done), []
            for worker in range(dp * pp):
                scope = call.waits_for[worker // pp][worker % pp]
                if scope:
                    waits = (n for m in self._members(worker, scope) for n in before[m])
                    self.add(LAUNCH + call.op, (worker,), waits)
                    callers.append(worker)
            for members in dict.fromkeys(
                tuple(m for m in self._members(w, call.scope) if m in callers) for w in callers
            ):
                self.add(call.op, members, (n for m in members for n in self.done[m]))

    def _members(self, worker: int, scope: str) -> tuple[int, ...]:
        pp = self.shape[1]
        d, s = groups(divmod(worker, pp), self.shape)[scope]
        return tuple((d * pp + s).tolist())

    def _first(self, rank: int) -> tuple[list[int], int]:
        """The ops that a rank receives from before its first op, and this op."""
        op = self.pipeline.orders[rank][0]
        received = [n for n in self.pipeline.predecessors[op] if self.pipeline.peer[n] == rank]
        return received, op

    def _call(self, stage: int, microbatch: int) -> int:
        return self.local[stage] * self.num_microbatches + microbatch

    def _kind(self, name: str, stage: int) -> str:
        return f"{name} {self.local[stage]}" if self.several else name

    def add_launches(self) -> None:
        """Adds the time of each worker before its pipeline; it ends where the first op starts."""
        for worker, done in enumerate(self.done):
            received, op = self._first(worker % self.shape[1])
            phase, stage, microbatch, *_ = self.ops[op]
            back = "forward" if phase == "F" else "backward"
            name = f"{back}-recv" if received else _NAMES[phase]
            calls = (self._call(stage, microbatch),)
            self.add(LAUNCH + PIPELINE, (worker,), done, op=name, calls=calls)

    def add_pipelines(self, replicas: Sequence[int]) -> None:
        graph, pp = self.pipeline, self.shape[1]
        starts: dict[tuple[int, int], tuple[int, ...]] = {}  # Further waits of first ops.
        for d, rank in it.product(replicas, range(pp)):
            received, first = self._first(rank)
            for op in received or [first]:
                starts[d, op] = (*starts.get((d, op), ()), *self.done[d * pp + rank])
        new: dict[int, list[int]] = {d: [] for d in replicas}
        exchanges: set[tuple[int, ...]] = set()

        def waits_of(d: int, op: int) -> list[int]:
            return [*(new[d][n] for n in graph.predecessors[op]), *starts.get((d, op), ())]

        for (op, (phase, stage, microbatch, rank, peer)), d in it.product(
            enumerate(self.ops), replicas
        ):
            number = d * self.num_microbatches + microbatch
            fields = {"phase": phase, "call": microbatch, "microbatch": number}
            fields["calls"] = (self._call(stage, microbatch),)
            worker, waits = d * pp + rank, waits_of(d, op)
            if phase == SEND_RECV:
                ends, back = (worker, d * pp + peer), bool(graph.backward[op])
                name, peer_stage = ("backward", stage - 1) if back else ("forward", stage + 1)
                slow = SLOW_LINK * (frozenset(ends) in self.slow_links)
                exchange = (*sorted(waits), *sorted(ends))
                fields |= {"op": name, "peer": ends[1], "twin": exchange in exchanges}
                fields["calls"] += (self._call(peer_stage, microbatch),)
                exchanges.add(exchange)
                node = self.add(self._kind(f"{name}-send_recv{slow}", stage), ends, waits, **fields)
            else:
                kind = self._kind(_NAMES[phase], stage)
                fields["op"] = _NAMES[phase]
                # All replicas have reached an op before any of them runs it.
                if kind in self.gathered:
                    waits = [n for replica in replicas for n in waits_of(replica, op)]
                if (kind, worker) in self.constants:
                    constant = CONSTANT + kind
                    waits = [self.add(constant, (worker,), waits, **fields | {"phase": constant})]
                node = self.add(kind, (worker,), waits, **fields)
                self.orders[worker].append(node)
            new[d].append(node)
        for d, s in it.product(replicas, range(pp)):
            self.done[d * pp + s] = tuple(new[d][n] for n in graph.last[s])

    def finished(self) -> StepGraph:
        columns = dict(zip(_Node._fields, zip(*self.nodes, strict=True), strict=True))
        rank = np.array([members[0] for members in columns["members"]])
        phase, none = np.array([n.phase or n.kind for n in self.nodes]), np.full(len(rank), -1)
        (replica, stage), call = np.divmod(rank, self.shape[1]), np.array(columns["call"])
        graph = OpGraph(
            phase=phase,
            stage=stage,
            microbatch=np.array(columns["microbatch"]),
            rank=rank,
            peer=np.array(columns["peer"]),
            other_stage=none,
            other_microbatch=none,
            backward=np.array([kind.startswith("backward") for kind in columns["kind"]]),
            predecessors=columns["predecessors"],
            orders=tuple(map(tuple, self.orders)),
            last=tuple(self.done),
        )
        names = ("kind", "op", "calls", "call", "members", "twin")
        kinds, computes = np.array(columns["kind"]), np.isin(phase, list(_NAMES))
        phases = {(COMPUTE.index(n.op), n.kind) for n in self.nodes if n.phase in _NAMES}
        ops = {kind: np.flatnonzero(kinds == kind) for kind in dict.fromkeys(columns["kind"])}
        return StepGraph(
            graph,
            **{name: columns[name] for name in names},
            computes=computes,
            phases=tuple(kind for _, kind in sorted(phases)),
            ops=ops,
            places={k: (replica[n], stage[n], call[n]) for k, n in ops.items()},
        )


def traced_graph(trace: Trace, outline: Outline) -> tuple[StepGraph, ByKind]:
    """The graph of a trace's steps with this outline, and the latencies of its ops."""
    step = step_graph(trace.job, outline)
    return step, _op_latencies(trace, step)


def _op_latencies(trace: Trace, step: StepGraph) -> ByKind:
    """The latency of each op in each step, from the end of the last op that it waited for, in
    seconds.

    So it contains neither the waits of workers nor, for collectives, the waits for other members.
    """
    pp = trace.job.layout.pp
    lowest = np.min([np.nanmin(x, axis=(1, 2, 3)) for x in trace.start.values()], axis=0)
    ends, latencies = np.empty((2, step.graph.num_ops, len(trace.steps)))
    phases, predecessors = step.graph.phase.tolist(), step.graph.predecessors
    columns = step.kind, step.op, phases, step.members, step.calls, predecessors
    for number, (kind, op, phase, members, calls, before) in enumerate(zip(*columns, strict=True)):
        places = [(*divmod(m, pp), call) for m, call in zip(members, calls, strict=True)]
        if kind.startswith(LAUNCH):
            end = trace.start[op][:, *places[0]]
        elif phase == SEND_RECV:
            sent, received = trace.end[f"{op}-send"], trace.end[f"{op}-recv"]
            end = np.maximum(sent[:, *places[0]], received[:, *places[1]])
        else:
            end = np.min([trace.end[op][:, *place] for place in places], axis=0)
        ends[number] = end - lowest
        ready = ends[list(before)].max(axis=0) if before else 0.0
        latencies[number] = np.maximum(ends[number] - ready, 0)
    return step.by_kind(latencies)


def replayed_step_times(step: StepGraph, latencies: ByKind) -> Float[np.ndarray, " steps"]:
    """Step times with given latencies: each op starts when all ops that it waits for have ended."""
    _, ends = replay_graph(step.graph.predecessors, step.by_op(latencies))
    return ends[[n for nodes in step.graph.last for n in nodes]].max(axis=0)
