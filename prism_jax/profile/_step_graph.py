"""The graph of a whole traced job: the pipelines of all replicas, and the ops around them."""

import dataclasses
import itertools as it
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from ..data import Job, Outline
from ..schedule import OVERLAPPED, SEND_RECV, AbstractSchedule, OpGraph, op_graph, order_of
from ..trace import COMPUTE, LETTERS, groups, stages_of_ranks


LAUNCH = "launch "  # The time of a worker before an op that runs once.
CONSTANT = "constant "  # Before the kind of the op that it is a part of, such as a sleep.
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
        numbered = {(COMPUTE.index(op), kind) for kind, op, computes in nodes if computes}
        return tuple(kind for _, kind in sorted(numbered))


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
    part = _Pipeline(pipeline, schedule, outline, constants)
    for worker in range(dp * pp):
        recorded = part.recorded_launch(worker % pp)
        nodes.add(LAUNCH + PIPELINE, worker, nodes.done[worker], **recorded)
    # The ops in which replicas wait for one another.
    for together in [range(dp)] if outline.gathered else [[d] for d in range(dp)]:
        nodes.add_pipelines(part, together)
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
        outline: Outline,
        constants: Collection[tuple[str, int]],
    ):
        self.graph, self.num_microbatches = graph, schedule.num_microbatches
        columns = graph.phase, graph.stage, graph.microbatch, graph.rank, graph.peer
        self.ops = list(zip(*(column.tolist() for column in columns), strict=True))
        self.gathered, self.constants = outline.gathered, constants
        self.slow_links = {frozenset(pair) for pair in outline.slow_links}
        ranks = stages_of_ranks(schedule.stage_to_rank, schedule.num_ranks)
        self.local = {stage: number for stages in ranks for number, stage in enumerate(stages)}
        self.several = schedule.num_stages > schedule.num_ranks

    def kind(self, name: str, stage: int) -> str:
        return f"{name} {self.local[stage]}" if self.several else name

    def call(self, stage: int, microbatch: int) -> int:
        return self.local[stage] * self.num_microbatches + microbatch

    def number(self, d: int, microbatch: int) -> dict:
        """The number of a microbatch in its replica, and over all replicas."""
        return {"call": microbatch, "microbatch": d * self.num_microbatches + microbatch}

    def first(self, rank: int) -> tuple[list[int], int]:
        """The ops that a rank receives from before its first op, and this op."""
        op = self.graph.orders[rank][0]
        received = [p for p in self.graph.predecessors[op] if self.graph.peer[p] == rank]
        return received, op

    def recorded_launch(self, rank: int) -> dict:
        """The op of a trace that starts when a rank reaches its pipeline."""
        received, op = self.first(rank)
        phase, stage, microbatch, *_ = self.ops[op]
        back = "forward" if phase == "F" else "backward"
        name = f"{back}-recv" if received else _NAMES[phase]
        return {"op": name, "calls": (self.call(stage, microbatch),)}


_NAMES = {letter: op for op, letter in LETTERS.items()}


class _Node(NamedTuple):
    """An op: what a `StepGraph` and an `OpGraph` have of it."""

    kind: str
    op: str
    calls: tuple[int, ...]
    call: int
    members: tuple[int, ...]
    twin: bool
    phase: str
    stage: int
    microbatch: int
    rank: int
    peer: int
    predecessors: tuple[int, ...]


class _Nodes:
    """Nodes in the order of addition, each after all nodes that it waits for."""

    def __init__(self, dp: int, pp: int):
        self.shape = dp, pp
        self.nodes: list[_Node] = []
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
        """Adds a node, and returns its number. One without a phase is the last of its workers."""
        members = members or (worker,)
        op, calls = op or kind.removeprefix(LAUNCH), calls or (0,) * len(members)
        place = phase or kind, worker % self.shape[1], microbatch, worker, peer
        before = tuple(sorted(set(predecessors)))
        self.nodes.append(_Node(kind, op, calls, call, members, twin, *place, before))
        number = len(self.nodes) - 1
        if not phase:
            for member in members:
                self.done[member] = (number,)
        return number

    def add_calls(self, calls) -> None:
        dp, pp = self.shape
        for call in calls:
            callers = [w for w in range(dp * pp) if call.waits_for[w // pp][w % pp]]
            before = list(self.done)
            for w in callers:
                scope = call.waits_for[w // pp][w % pp]
                waits = self._members(w, scope)
                self.add(LAUNCH + call.op, w, (n for m in waits for n in before[m]))
            for members in dict.fromkeys(
                tuple(m for m in self._members(w, call.scope) if m in callers) for w in callers
            ):
                launched = [n for m in members for n in self.done[m]]
                self.add(call.op, members[0], launched, members=members)

    def _members(self, worker: int, scope: str) -> tuple[int, ...]:
        dp, pp = self.shape
        d, s = groups((worker // pp, worker % pp), (dp, pp))[scope]
        return tuple((d * pp + s).tolist())

    def add_pipelines(self, part: _Pipeline, replicas: Sequence[int]) -> None:
        graph, pp = part.graph, self.shape[1]
        starts: dict[tuple[int, int], tuple[int, ...]] = {}  # Further waits of first ops.
        for d, rank in it.product(replicas, range(pp)):
            received, first = part.first(rank)
            for op in received or [first]:
                starts[d, op] = (*starts.get((d, op), ()), *self.done[d * pp + rank])
        new: dict[int, list[int]] = {d: [] for d in replicas}
        seen: set[tuple[int, ...]] = set()

        def waits_of(d: int, op: int) -> list[int]:
            return [*(new[d][p] for p in graph.predecessors[op]), *starts.get((d, op), ())]

        for (op, (phase, stage, microbatch, rank, _)), d in it.product(
            enumerate(part.ops), replicas
        ):
            if phase == SEND_RECV:
                node = self._add_send_recv(part, op, waits_of(d, op), seen, d)
            else:
                kind, worker = part.kind(_NAMES[phase], stage), d * pp + rank
                location = {"op": _NAMES[phase], "calls": (part.call(stage, microbatch),)}
                location |= part.number(d, microbatch)
                # All replicas have reached an op before any of them runs it.
                whom = replicas if kind in part.gathered else [d]
                waits = [n for replica in whom for n in waits_of(replica, op)]
                if (kind, worker) in part.constants:
                    part_of = CONSTANT + kind
                    waits = [self.add(part_of, worker, waits, phase=part_of, **location)]
                node = self.add(kind, worker, waits, phase=phase, **location)
                self.orders[worker].append(node)
            new[d].append(node)
        for d, s in it.product(replicas, range(pp)):
            self.done[d * pp + s] = tuple(new[d][n] for n in graph.last[s])

    def _add_send_recv(
        self, part: _Pipeline, op: int, waits: list[int], seen: set[tuple[int, ...]], d: int
    ) -> int:
        phase, stage, microbatch, *ends = part.ops[op]
        back = bool(part.graph.backward[op])
        name, peer_stage = ("backward", stage - 1) if back else ("forward", stage + 1)
        members = d * self.shape[1] + ends[0], d * self.shape[1] + ends[1]
        slow = frozenset(members) in part.slow_links
        key = (*sorted(waits), *sorted(ends))
        twin = key in seen
        seen.add(key)
        return self.add(
            part.kind(f"{name}-send_recv{SLOW_LINK * slow}", stage),
            members[0],
            waits,
            op=name,
            calls=(part.call(stage, microbatch), part.call(peer_stage, microbatch)),
            members=members,
            peer=members[1],
            twin=twin,
            phase=phase,
            **part.number(d, microbatch),
        )

    def finished(self) -> StepGraph:
        columns = dict(zip(_Node._fields, zip(*self.nodes, strict=True), strict=True))
        none = np.full(len(self.nodes), -1)
        names = "phase", "stage", "microbatch", "rank", "peer"
        graph = OpGraph(
            **{name: np.array(columns[name]) for name in names},
            other_stage=none,
            other_microbatch=none,
            backward=np.array([kind.startswith("backward") for kind in columns["kind"]]),
            predecessors=columns["predecessors"],
            orders=tuple(map(tuple, self.orders)),
            last=tuple(self.done),
        )
        return StepGraph(graph, **{name: columns[name] for name in _Node._fields[:6]})
