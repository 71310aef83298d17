"""Saves simulated steps as a trace that Perfetto (ui.perfetto.dev) shows.

Source of the format: "Trace Event Format", the Catapult project. Ranges have the names that PyTorch
gives them, so that tools for PyTorch's profiles can read the trace.
"""

import itertools as it
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._files import written_whole
from ..analysis import SampledStep
from ..schedule import OVERLAPPED, PHASES, SEND_RECV


# Processes: of each step one for each rank, then its critical path.
_FIRST_RANK = 1
# Threads of a rank. The threads for send_recvs follow, one for each that is under way at a time.
_STEP, _COMPUTE, _REDUCTION, _TAIL, _SEND_RECV = range(5)
# Beyond these are the ranks of a profile, with a thread of compute and one of collectives.
_FIRST_MEASURED, _MEASURED = 10**7, {"compute": 0, "collective": 10**6}
_THREADS = {_STEP: "step", _COMPUTE: "compute", _REDUCTION: "gradients", _TAIL: "after the barrier"}

Event = dict[str, Any]
# Of each rank the thread, the name, the start and the end of what it ran, in seconds.
Rows = Mapping[int, Sequence[tuple[str, str, float, float]]]
# By phase and stage, the mean seconds of the kinds of kernels in an op.
Kernels = Mapping[tuple[str, int], Mapping[str, float]]


class _Shown(NamedTuple):
    """A step among those that are shown.

    **Attributes:**

    - `step`, `number`, `among`: the step, its place, and how many there are.
    - `lanes`: the thread of each send_recv.
    - `kernels`: what its ops are made of.
    """

    step: SampledStep
    number: int
    among: int
    lanes: dict[int, int]
    kernels: Kernels

    def thread(self, rank: int, lane: int) -> dict[str, int]:
        """The process of a rank, or of the critical path as that of one rank more, and a thread.

        The id of a thread is unique across processes: Perfetto merges threads with the same id,
        because operating systems number them across processes, and takes 0 for the kernel. The
        first thread has the id of its process, which makes it the main thread; it is shown first.
        """
        of_step = self.step.num_ranks + 1
        pid = _FIRST_RANK + self.number * of_step + rank
        return {"pid": pid, "tid": pid + lane * (_FIRST_RANK + self.among * of_step)}

    def name(self, text: str) -> str:
        """The name of a process; of several steps, with the quantile."""
        return text if self.among == 1 else f"{text}, p{100 * self.step.quantile:g}"


def save_chrome_trace(
    steps: SampledStep | Sequence[SampledStep],
    path: str | os.PathLike[str],
    measured: Rows | None = None,
    kernels: Kernels | None = None,
) -> None:
    """Writes simulated steps to a JSON file that Perfetto (ui.perfetto.dev) shows.

    **Arguments:**

    - `steps`: from `prism.sample_step`. Of several, such as a typical and a slow one, the rank of
        one stands beside that of the other.
    - `path`: the file, which is written whole or not at all.
    - `measured`: the step of each rank of a profile, from `trace.median_steps`, to stand beside.
    - `kernels`: what ops are made of, from `prediction.kernels_of_ops`, to be shown within them.

    **Raises:**

    `OSError` if the file cannot be written.
    """
    text = json.dumps(chrome_trace(steps, measured, kernels), allow_nan=False)
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def chrome_trace(
    steps: SampledStep | Sequence[SampledStep],
    measured: Rows | None = None,
    kernels: Kernels | None = None,
) -> dict[str, Any]:
    """Simulated steps in Chrome's trace format. Each pipeline rank is a process, with threads for
    the step, its compute, its exposed gradient reduction, the tail after the barrier of all ranks,
    and send_recvs. A flow leads from each send_recv to the op that waits for it. The critical path
    is a process of its own, and ops on it have the argument `critical`. Within an op, its latency
    is divided among its kernels as their means are.

    **Arguments:**

    - `steps`, `measured`, `kernels`: as of `save_chrome_trace`; a measured rank is a process of its
        own.

    **Returns:**

    A dictionary to be written as JSON; its times are in microseconds, as the format demands.
    """
    steps = [steps] if isinstance(steps, SampledStep) else [*steps]
    figures = [
        {"quantile": step.quantile, "step_s": step.step_s, "num_replicas": step.num_replicas}
        for step in steps
    ]
    events: list[Event] = []
    for number, step in enumerate(steps):
        shown = _Shown(step, number, len(steps), _lanes(step), kernels or {})
        for part in (_names, _ops, _flows, _of_ranks, _critical_path):
            events += part(shown)
    return {
        "displayTimeUnit": "ms",
        "otherData": {**figures[0], "steps": figures},
        "traceEvents": [*events, *_of_profile(measured or {}, len(steps))],
    }


def op_name(step: SampledStep, op: int) -> str:
    """The name that PyTorch gives to an op: `PP:2F7` is the forward of microbatch 7 on stage 2.
    An op outside of the pipeline has the name of its phase, such as `optimizer`.
    """
    ops = step.ops
    phase, stage, microbatch = (ops[name][op] for name in ("phase", "stage", "microbatch"))
    if phase not in (*PHASES, OVERLAPPED, SEND_RECV):
        return str(phase)
    if phase == SEND_RECV:
        receiver = step.receivers[op]
        backward = receiver >= 0 and ops["stage"][receiver] < stage
        phase = "SEND_B" if backward else "SEND_F"
    return f"PP:{stage}{phase}{microbatch}"


def _lanes(step: SampledStep) -> dict[int, int]:
    """The thread of each send_recv: the first thread of its rank that is free when it starts."""
    ops, threads = step.ops, {}
    free: dict[int, list[float]] = {}  # From when on each thread of a rank is free.
    sends = np.flatnonzero(ops["phase"] == SEND_RECV)
    for op in sends[np.argsort(ops["start_s"][sends], kind="stable")].tolist():
        rank, start, end = (ops[name][op].item() for name in ("rank", "start_s", "end_s"))
        of_rank = free.setdefault(rank, [])
        lane = next((i for i, since in enumerate(of_rank) if since <= start), len(of_rank))
        of_rank[lane : lane + 1] = [end]
        threads[op] = _SEND_RECV + lane
    return threads


def _names(of: _Shown) -> Iterator[Event]:
    """The names of processes and threads, and the order in which they are shown."""

    def named(key, rank, lane, **args):
        return {"ph": "M", "name": key, **of.thread(rank, lane), "args": args}

    path = of.step.num_ranks
    yield named("process_name", path, 0, name=of.name("critical path"))
    yield named("process_sort_index", path, 0, sort_index=of.number)
    yield named("thread_name", path, 0, name="critical path")
    for rank in range(of.step.num_ranks):
        yield named("process_name", rank, 0, name=of.name(f"rank {rank}"))
        order = (_FIRST_RANK + rank) * (of.among + 1) + of.number
        yield named("process_sort_index", rank, 0, sort_index=order)
        of_rank = {lane for op, lane in of.lanes.items() if of.step.ops["rank"][op] == rank}
        threads = _THREADS | {
            lane: f"send_recv {lane - _SEND_RECV + 1}" for lane in sorted(of_rank)
        }
        for lane, name in threads.items():
            yield named("thread_name", rank, lane, name=name)
            yield named("thread_sort_index", rank, lane, sort_index=lane)


def _microseconds(seconds: float) -> float:
    return round(1e6 * float(seconds), 3)  # To a nanosecond, as in profilers' traces.


def _range(name: str, start: float, end: float, where: dict[str, int], **args: Any) -> Event:
    """A complete event, of the category that the PyTorch profiler gives to named ranges."""
    begin = _microseconds(start)
    event = {"ph": "X", "cat": "user_annotation", "name": name, **where}
    return event | {"ts": begin, "dur": round(_microseconds(end) - begin, 3), "args": args}


def _ops(of: _Shown) -> Iterator[Event]:
    ops = of.step.ops
    columns = (ops[name].tolist() for name in ("phase", "stage", "microbatch"))
    # An op that is cut where gradients are reduced is several, of which no means are known.
    pieces = Counter(zip(*columns, strict=True))
    for op in range(len(of.step.receivers)):
        args = {name: ops[name][op].item() for name in ("phase", "stage", "microbatch", "critical")}
        where = of.thread(int(ops["rank"][op]), of.lanes.get(op, _COMPUTE))
        start, end = ops["start_s"][op].item(), ops["end_s"][op].item()
        yield _range(op_name(of.step, op), start, end, where, **args)
        kernels = of.kernels.get((args["phase"], args["stage"]), {})
        if pieces[args["phase"], args["stage"], args["microbatch"]] > 1:
            continue
        means = np.array([*kernels.values()])
        ends = start + (end - start) * np.cumsum(means) / max(means.sum(), 1e-300)
        edges = [start, *np.minimum(ends, end).tolist()]
        for kind, mean_s, (began, ended) in zip(kernels, means, it.pairwise(edges), strict=True):
            share = float(mean_s / means.sum())
            of_kernels = _range(kind, began, ended, where, mean_s=float(mean_s), share=share)
            yield {**of_kernels, "cat": "kernel"}


def _flows(of: _Shown) -> Iterator[Event]:
    """A flow from each send_recv to the op that waits for it."""
    ops = of.step.ops
    first = of.number * len(of.step.receivers)
    for op, lane in of.lanes.items():
        receiver = int(of.step.receivers[op])
        if receiver < 0:
            continue
        begin, end = ({"ph": "s"}, op, lane), ({"ph": "f", "bp": "e"}, receiver, _COMPUTE)
        for phase, node, lane_of_node in (begin, end):
            where = of.thread(int(ops["rank"][node]), lane_of_node)
            flow = {"cat": "send_recv", "name": "send_recv", "id": first + op, **where}
            yield {**phase, **flow, "ts": _microseconds(ops["start_s"][node])}


def _of_ranks(of: _Shown) -> Iterator[Event]:
    """The ranges that each rank has once in the step."""
    step = of.step
    stage, rank = step.ops["stage"], step.ops["rank"]
    for r, (start, end) in enumerate(step.reduction_s.tolist()):
        steps, reduction, tail = (of.thread(r, lane) for lane in (_STEP, _REDUCTION, _TAIL))
        yield _range(f"ProfilerStep#{of.number}", 0.0, step.step_s, steps)
        if end > start:
            name = f"PP:{stage[rank == r].min()}REDUCE_GRAD"
            yield _range(name, start, end, reduction, critical=r == step.last_rank)
        if step.step_s > step.barrier_s:
            yield _range("optimizer", step.barrier_s, step.step_s, tail, critical=True)


def _critical_path(of: _Shown) -> Iterator[Event]:
    """The critical path again, in one row, in a category of its own."""
    step = of.step
    ranks, starts, ends = (step.ops[name] for name in ("rank", "start_s", "end_s"))
    pieces = [
        (f"{op_name(step, op)} on rank {ranks[op]}", starts[op].item(), ends[op].item())
        for op in step.path.tolist()
    ]
    pieces.append(("gradients", *step.reduction_s[step.last_rank].tolist()))
    pieces.append(("after the barrier", step.barrier_s, step.step_s))
    where = of.thread(step.num_ranks, 0)
    for name, start, end in pieces:
        if end > start:
            yield {**_range(name, start, end, where, critical=True), "cat": "critical_path"}


def _of_profile(measured: Rows, among: int) -> Iterator[Event]:
    """The ranks of a profile, each below the predicted one of its number."""
    for rank, spans in sorted(measured.items()):
        pid = _FIRST_MEASURED + rank
        names = {"ph": "M", "pid": pid, "tid": pid}
        yield names | {"name": "process_name", "args": {"name": f"rank {rank}, measured"}}
        order = {"sort_index": (_FIRST_RANK + rank) * (among + 1) + among}
        yield names | {"name": "process_sort_index", "args": order}
        for lane, offset in _MEASURED.items():
            yield names | {"name": "thread_name", "tid": pid + offset, "args": {"name": lane}}
        for lane, name, start, end in spans:
            where = {"pid": pid, "tid": pid + _MEASURED[lane]}
            yield {**_range(name, start, end, where), "cat": "measured"}
