"""The graph of a whole traced job: the pipelines of all replicas, and what surrounds them."""

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float

from ..data import Job, Outline
from ..schedule import SEND_RECV, OpGraph, make_schedule, op_graph, replay as replay_graph
from ..trace import Trace, groups


LAUNCH = "launch "  # What a worker does before it comes to an op.
PIPELINE = "pipeline"


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A graph whose ranks are the workers of a job, `dp_rank * pp + stage`.

    **Attributes:**

    - `graph`: the ops. Microbatches are numbered through all replicas.
    - `kind`: what each op is, in the words of traces; `forward-send_recv`, `backward-send_recv`;
        `launch ...` for what precedes an op that runs once.
    - `call`: the microbatch within its replica, 0 for ops that run once.
    - `members`: of an op that several workers run together, these; else the worker.
    - `twin`: whether a send_recv shares its exchange with the one before it, which takes the time.
    """

    graph: OpGraph
    kind: tuple[str, ...]
    call: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    twin: tuple[bool, ...]


def step_graph(job: Job, outline: Outline) -> StepGraph:
    """Builds the graph of all replicas of a job.

    **Arguments:**

    - `job`: its layout and schedule.
    - `outline`: what workers run before and after the pipeline.
    """
    dp, pp = job.layout.dp, job.layout.pp
    schedule = make_schedule(
        job.schedule.kind, num_ranks=pp, num_microbatches=job.schedule.num_microbatches
    )
    # As recorded: a transfer is an op of both of its workers.
    pipeline = op_graph(schedule, blocking=job.schedule.blocking is not False)
    split = sorted({*pipeline.phase.tolist()} - {"F", "B", SEND_RECV})
    if split:
        raise ValueError(
            f"Job `{job.name}` runs `{job.schedule.kind}` with ops of phase {split}; only traces "
            "of whole forwards and backwards can be read."
        )
    nodes = _Nodes(dp, pp)
    nodes.add_calls(outline.before)
    for worker in range(dp * pp):
        nodes.add(LAUNCH + PIPELINE, worker, nodes.done[worker])
    for d in range(dp):
        nodes.add_pipeline(pipeline, d, job.schedule.num_microbatches)
    nodes.add_calls(outline.after)
    return nodes.finished()


class _Nodes:
    """Nodes as they are added, each after all that it waits for."""

    def __init__(self, dp: int, pp: int):
        self.shape = dp, pp
        self.columns: dict[str, list] = {
            name: [] for name in ("kind", "call", "members", "twin", "phase", "stage", "microbatch")
        }
        self.peer: list[int] = []
        self.backward: list[bool] = []
        self.predecessors: list[tuple[int, ...]] = []
        self.worker: list[int] = []
        self.done: list[tuple[int, ...]] = [()] * (dp * pp)  # What each worker did last.
        self.orders: list[list[int]] = [[] for _ in range(dp * pp)]

    def add(
        self,
        kind: str,
        worker: int,
        predecessors: Iterable[int],
        *,
        members: tuple[int, ...] = (),
        phase: str = "X",
        microbatch: int = -1,
        call: int = 0,
        peer: int = -1,
        twin: bool = False,
    ) -> int:
        node = len(self.worker)
        members = members or (worker,)
        row = (kind, call, members, twin, phase, worker % self.shape[1], microbatch)
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        self.worker.append(worker)
        self.peer.append(peer)
        self.backward.append(kind.startswith("backward"))
        self.predecessors.append(tuple(sorted(set(predecessors))))
        if phase == "X":
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

    def add_pipeline(self, graph: OpGraph, d: int, num_microbatches: int) -> None:
        pp = self.shape[1]
        starts = {w: self.done[w] for w in range(d * pp, (d + 1) * pp)}
        new: list[int] = []
        seen: dict[tuple[int, ...], int] = {}
        for op in range(graph.num_ops):
            rank, microbatch = int(graph.rank[op]), int(graph.microbatch[op])
            phase, peer = str(graph.phase[op]), int(graph.peer[op])
            worker = d * pp + rank
            waits = [new[p] for p in graph.predecessors[op]]
            numbered = {"phase": phase, "call": microbatch}
            numbered["microbatch"] = d * num_microbatches + microbatch
            if phase == SEND_RECV:
                back = bool(graph.backward[op])
                if not back and microbatch == 0:
                    waits += starts[d * pp + peer]  # Its first op of the pipeline.
                key = (*sorted(waits), *sorted((rank, peer)))
                node = self.add(
                    ("backward" if back else "forward") + "-send_recv",
                    worker,
                    waits,
                    members=(worker, d * pp + peer),
                    peer=d * pp + peer,
                    twin=key in seen,
                    **numbered,
                )
                seen.setdefault(key, node)
            else:
                if not graph.predecessors[op]:
                    waits += starts[worker]
                kind = "forward-compute" if phase == "F" else "backward-compute"
                node = self.add(kind, worker, waits, **numbered)
                self.orders[worker].append(node)
            new.append(node)
        for s in range(pp):
            self.done[d * pp + s] = tuple(new[n] for n in graph.last[s])

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
        kind, call, members, twin = (tuple(c[n]) for n in ("kind", "call", "members", "twin"))
        return StepGraph(graph, kind, call, members, twin)


def op_latencies(trace: Trace, step: StepGraph) -> Float[np.ndarray, "ops steps"]:
    """What each op of each step took, from the end of the last op that it waited for, in seconds.

    So what a worker waited for is not part of it, nor of a collective what it waited for others.
    """
    ends = _recorded_ends(trace, step)
    latencies = np.empty_like(ends)
    for op, before in enumerate(step.graph.predecessors):
        ready = ends[list(before)].max(axis=0) if before else 0.0
        latencies[op] = ends[op] - ready
    return np.maximum(latencies, 0)


def _recorded_ends(trace: Trace, step: StepGraph) -> Float[np.ndarray, "ops steps"]:
    pp = trace.job.layout.pp
    lowest = np.min([np.nanmin(x, axis=(1, 2, 3)) for x in trace.start.values()], axis=0)
    ends = np.empty((step.graph.num_ops, len(trace.steps)))
    for op, (kind, call) in enumerate(zip(step.kind, step.call, strict=True)):
        places = [(m // pp, m % pp) for m in step.members[op]]
        if kind.startswith(LAUNCH):
            name = kind.removeprefix(LAUNCH)
            if name == PIPELINE:
                name = "forward-recv" if places[0][1] else "forward-compute"
            ends[op] = trace.start[name][:, *places[0], 0]
        elif kind.endswith("send_recv"):
            phase = kind.split("-")[0]
            sent = trace.end[f"{phase}-send"][:, *places[0], call]
            received = trace.end[f"{phase}-recv"][:, *places[1], call]
            ends[op] = np.maximum(sent, received)
        else:
            ends[op] = np.min([trace.end[kind][:, *place, call] for place in places], axis=0)
    return ends - lowest


def replay(
    step: StepGraph, latencies: Float[np.ndarray, "ops steps"]
) -> Float[np.ndarray, " steps"]:
    """Step times of given latencies: each op starts when all that it waits for has ended."""
    _, ends = replay_graph(step.graph.predecessors, latencies)
    return ends[[n for nodes in step.graph.last for n in nodes]].max(axis=0)
