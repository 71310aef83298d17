"""The graph of a whole traced job: the pipelines of all replicas, and the ops around them."""

import dataclasses
import itertools as it
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool

from ..data import Job, Outline
from ..schedule import OVERLAPPED, SEND_RECV, AbstractSchedule, OpGraph, op_graph, order_of
from ..trace import COMPUTE, LETTERS, groups, stages_of_ranks


LAUNCH = "launch "  # The time of a worker before an op that runs once.
PIPELINE = "pipeline"
SLOW_LINK = " slow link"  # For send_recvs between nodes, if a trace shows them.


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
    """

    graph: OpGraph
    kind: tuple[str, ...]
    op: tuple[str, ...]
    calls: tuple[tuple[int, ...], ...]
    call: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    twin: tuple[bool, ...]

    @property
    def computes(self) -> Bool[np.ndarray, " ops"]:
        """Which ops compute."""
        return np.isin(self.op, COMPUTE) & np.isin(self.graph.phase, list(_NAMES))

    @property
    def phases(self) -> tuple[str, ...]:
        """The kinds of compute: forwards first, stage after stage."""
        nodes = zip(self.kind, self.op, self.computes.tolist(), strict=True)
        mine = {(COMPUTE.index(op), kind) for kind, op, computes in nodes if computes}
        return tuple(kind for _, kind in sorted(mine))


def step_graph(job: Job, outline: Outline) -> StepGraph:
    """Builds the graph of all replicas of a job.

    **Arguments:**

    - `job`: a job with its layout and schedule.
    - `outline`: the ops of workers before and after the pipeline.

    **Raises:**

    `ValueError` for a schedule with pairs of overlapped ops or several chains of stages.
    """
    dp, pp = job.layout.dp, job.layout.pp
    schedule = order_of(job.schedule, job.layout)
    # As recorded: a transfer is an op of both of its workers, if the order allows it.
    blocking = job.schedule.blocking
    pipeline = op_graph(schedule, blocking=_may_block(schedule) if blocking is None else blocking)
    if OVERLAPPED in pipeline.phase or len(schedule.chain_starts) > 1:
        raise ValueError(
            f"Job `{job.name}` runs `{job.schedule.kind}`; only traces of forwards and backwards "
            "by themselves, on one chain of stages, can be read."
        )
    nodes = _Nodes(dp, pp)
    nodes.add_calls(outline.before)
    part = _Pipeline(pipeline, schedule, job.schedule.num_microbatches, outline.slow_links)
    for worker in range(dp * pp):
        nodes.add(
            LAUNCH + PIPELINE, worker, nodes.done[worker], **part.recorded_launch(worker % pp)
        )
    # The ops in which replicas wait for one another.
    for together in [range(dp)] if outline.gathered else [[d] for d in range(dp)]:
        nodes.add_pipelines(part, together, outline.gathered)
    nodes.add_calls(outline.after)
    return nodes.finished()


def _may_block(schedule: AbstractSchedule) -> bool:
    """Whether sends and receives may block compute: with one stage per rank and whole backwards."""
    split = any("I" in token for order in schedule.orders() for token in order)
    return schedule.num_stages == schedule.num_ranks and not split


class _Pipeline:
    """The pipeline of one replica, and the places of its ops in a trace."""

    def __init__(
        self,
        graph: OpGraph,
        schedule: AbstractSchedule,
        num_microbatches: int,
        slow_links: Sequence[tuple[int, int]],
    ):
        self.graph, self.num_microbatches = graph, num_microbatches
        self.slow_links = {frozenset(pair) for pair in slow_links}
        ranks = stages_of_ranks(schedule.stage_to_rank, schedule.num_ranks)
        self.local = {stage: number for stages in ranks for number, stage in enumerate(stages)}
        self.several = schedule.num_stages > schedule.num_ranks

    def kind(self, name: str, stage: int) -> str:
        return f"{name} {self.local[stage]}" if self.several else name

    def call(self, stage: int, microbatch: int) -> int:
        return self.local[stage] * self.num_microbatches + microbatch

    def number(self, d: int, op: int) -> dict:
        """The phase, call and microbatch of an op. Microbatches are numbered over all replicas."""
        microbatch = int(self.graph.microbatch[op])
        numbers = {"call": microbatch, "microbatch": d * self.num_microbatches + microbatch}
        return {"phase": str(self.graph.phase[op]), **numbers}

    def is_slow(self, members: tuple[int, int]) -> bool:
        return frozenset(members) in self.slow_links

    def first(self, rank: int) -> tuple[list[int], int]:
        """The ops that a rank receives from before its first op, and this op."""
        op = self.graph.orders[rank][0]
        received = [p for p in self.graph.predecessors[op] if self.graph.peer[p] == rank]
        return received, op

    def recorded_launch(self, rank: int) -> dict:
        """The op of a trace that starts when a rank reaches its pipeline."""
        received, op = self.first(rank)
        stage, microbatch = int(self.graph.stage[op]), int(self.graph.microbatch[op])
        phase = str(self.graph.phase[op])
        back = "forward" if phase == "F" else "backward"
        name = f"{back}-recv" if received else _NAMES[phase]
        return {"op": name, "calls": (self.call(stage, microbatch),)}


_NAMES = {letter: op for op, letter in LETTERS.items()}


class _Nodes:
    """Nodes in the order of addition, each after all nodes that it waits for."""

    def __init__(self, dp: int, pp: int):
        self.shape = dp, pp
        self.columns: dict[str, list] = {
            name: []
            for name in (
                *("kind", "op", "calls", "call", "members", "twin"),
                *("phase", "stage", "microbatch"),
            )
        }
        self.peer: list[int] = []
        self.backward: list[bool] = []
        self.predecessors: list[tuple[int, ...]] = []
        self.worker: list[int] = []
        self.done: list[tuple[int, ...]] = [()] * (dp * pp)  # The last ops of each worker.
        self.orders: list[list[int]] = [[] for _ in range(dp * pp)]

    def add(
        self,
        kind: str,
        worker: int,
        predecessors: Iterable[int],
        *,
        op: str = "",
        calls: tuple[int, ...] = (),
        members: tuple[int, ...] = (),
        phase: str = "",
        microbatch: int = -1,
        call: int = 0,
        peer: int = -1,
        twin: bool = False,
    ) -> int:
        node = len(self.worker)
        members = members or (worker,)
        op, calls = op or kind.removeprefix(LAUNCH), calls or (0,) * len(members)
        row = (kind, op, calls, call, members, twin, phase or kind)
        row = (*row, worker % self.shape[1], microbatch)
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        self.worker.append(worker)
        self.peer.append(peer)
        self.backward.append(kind.startswith("backward"))
        self.predecessors.append(tuple(sorted(set(predecessors))))
        if not phase:
            for member in members:
                self.done[member] = (node,)
        return node

    def add_calls(self, calls) -> None:
        dp, pp = self.shape
        for call in calls:
            mine = [w for w in range(dp * pp) if call.waits_for[w // pp][w % pp]]
            before = list(self.done)
            for w in mine:
                scope = call.waits_for[w // pp][w % pp]
                waits = self._members(w, scope)
                self.add(LAUNCH + call.op, w, (n for m in waits for n in before[m]))
            for members in dict.fromkeys(
                tuple(m for m in self._members(w, call.scope) if m in mine) for w in mine
            ):
                launched = [n for m in members for n in self.done[m]]
                self.add(call.op, members[0], launched, members=members)

    def _members(self, worker: int, scope: str) -> tuple[int, ...]:
        dp, pp = self.shape
        d, s = groups((worker // pp, worker % pp), (dp, pp))[scope]
        return tuple((d * pp + s).tolist())

    def add_pipelines(
        self, part: _Pipeline, replicas: Sequence[int], gathered: Sequence[str]
    ) -> None:
        graph, pp = part.graph, self.shape[1]
        starts: dict[tuple[int, int], tuple[int, ...]] = {}  # Further waits of first ops.
        for d, rank in it.product(replicas, range(pp)):
            received, first = part.first(rank)
            for op in received or [first]:
                starts[d, op] = (*starts.get((d, op), ()), *self.done[d * pp + rank])
        new: dict[int, list[int]] = {d: [] for d in replicas}
        seen: dict[tuple[int, ...], int] = {}

        def waits_of(d: int, op: int) -> list[int]:
            return [*(new[d][p] for p in graph.predecessors[op]), *starts.get((d, op), ())]

        for op, d in it.product(range(graph.num_ops), replicas):
            if graph.phase[op] == SEND_RECV:
                node = self._add_send_recv(part, d, op, waits_of(d, op), seen)
            else:
                stage, microbatch = int(graph.stage[op]), int(graph.microbatch[op])
                name, calls = _NAMES[str(graph.phase[op])], (part.call(stage, microbatch),)
                kind = part.kind(name, stage)
                # All replicas have reached an op before any of them runs it.
                whom = replicas if kind in gathered else [d]
                waits = [n for other in whom for n in waits_of(other, op)]
                worker = d * pp + int(graph.rank[op])
                node = self.add(kind, worker, waits, op=name, calls=calls, **part.number(d, op))
                self.orders[worker].append(node)
            new[d].append(node)
        for d, s in it.product(replicas, range(pp)):
            self.done[d * pp + s] = tuple(new[d][n] for n in graph.last[s])

    def _add_send_recv(
        self, part: _Pipeline, d: int, op: int, waits: list[int], seen: dict[tuple[int, ...], int]
    ) -> int:
        graph, pp = part.graph, self.shape[1]
        rank, peer = int(graph.rank[op]), int(graph.peer[op])
        stage, microbatch = int(graph.stage[op]), int(graph.microbatch[op])
        name, other = ("backward", stage - 1) if graph.backward[op] else ("forward", stage + 1)
        members = d * pp + rank, d * pp + peer
        key = (*sorted(waits), *sorted((rank, peer)))
        node = self.add(
            part.kind(f"{name}-send_recv{SLOW_LINK * part.is_slow(members)}", stage),
            members[0],
            waits,
            op=name,
            calls=(part.call(stage, microbatch), part.call(other, microbatch)),
            members=members,
            peer=members[1],
            twin=key in seen,
            **part.number(d, op),
        )
        seen.setdefault(key, node)
        return node

    def finished(self) -> StepGraph:
        c = self.columns
        none = np.full(len(self.worker), -1)
        graph = OpGraph(
            phase=np.array(c["phase"]),
            stage=np.array(c["stage"]),
            microbatch=np.array(c["microbatch"]),
            rank=np.array(self.worker),
            peer=np.array(self.peer),
            other_stage=none,
            other_microbatch=none,
            backward=np.array(self.backward),
            predecessors=tuple(self.predecessors),
            orders=tuple(tuple(order) for order in self.orders),
            last=tuple(self.done),
        )
        names = ("kind", "op", "calls", "call", "members", "twin")
        return StepGraph(graph, **{name: tuple(c[name]) for name in names})
