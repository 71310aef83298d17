"""What a rank ran, kernel by kernel: whether it computes, communicates or copies, and in which
phase of the step it does so, which is the phase of its launch.
"""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int

from ._spans import (
    BACKWARD,
    COLLECTIVES,
    FORWARD,
    OPTIMIZE,
    Kind,
    Message,
    RankOp,
    Spans,
    collective_of,
    is_copy,
)
from ._trace import COMPUTE, OPTIMIZER, TRANSFERS, RangeNames


# What kernels do.
COMPUTES, TALKS, COPIES = range(3)
# Names of kernels that communicate, with the collective that they run. Those of NCCL and RCCL end
# in it; an expert-parallel dispatch or combine is an all-to-all.
_NCCL = re.compile(r"(?:void )?[nr]ccl\w*?Kernel\w*?_([A-Za-z]+)", re.IGNORECASE)
_XLA = re.compile(
    r"(?:async-)?(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|send|recv)"
    r"(?:-start|-done)?(?:[.\d]*)$"
)
_OTHERS = tuple(
    (re.compile(text, re.IGNORECASE), kind)
    for text, kind in (
        (r"\b\w*ep::(?:\w+::)*(?:dispatch|combine|cached_notify|notify_dispatch)\b", "all_to_all"),
        (
            r"nvshmem\w*(?:alltoall|all_to_all)|(?<![a-z])all_?to_?all(?!.*gemm)\w*kernel",
            "all_to_all",
        ),
        (r"multimem_all_gather|(?<![a-z])all_?gather\w*kernel", "all_gather"),
        (r"reduce_?scatter\w*kernel", "reduce_scatter"),
        (
            r"multimem_\w*all_?reduce|(?:one|two)_?shot_all_?reduce|(?<![a-z])all_?reduce\w*kernel",
            "all_reduce",
        ),
        (r"cross_device_reduce|userbuffers_\w*sum|all_?reduce_fusion|lamport_style", "all_reduce"),
        (r"^(?:void )?(?:nvshmem|rocshmem|[nr]ccl|msccl|oneccl)", "unknown"),
    )
)
_UNCLEAR = ("send_recv", "unknown")  # What the kernel's name does not tell.
_MOST_IN_NODES = 0.8  # A thread with a larger share of its launches in autograd's nodes is its.
_KNOWN = 0.5  # Phases are known if those of at least this share of compute are.


@dataclasses.dataclass(frozen=True)
class Work:
    """The kernels of a rank in the order of their launches; without a device, the outermost
    operators of the host and its collectives, which launch themselves. Times are in nanoseconds.

    **Attributes:**

    - `start`, `end`: when each runs.
    - `launched`, `joined`, `lane`: when and by which thread it was launched, or -1. What is not
      `joined` to a launch counts as launched when it starts.
    - `activity`: whether it computes, communicates or copies.
    - `phase`: an index of `PHASES`, or -1 if it is not known.
    - `name`: an index of the names of the spans.
    - `message`, `sequence`: an index of `messages`, and its number in its group, or -1.
    - `main`: whether it computes on the stream that does so longest; all that runs there counts
      where nothing computes or no launch was recorded.
    - `graph`: whether the launch of a graph launched it.
    - `ranges`: the named ranges of the host that are ops or parts of them.
    - `parts`: whether each of these is a part only.
    - `training`: whether there is a backward or an optimizer; `None` if nothing tells.
    - `arrows`: when operators of forwards start, and when their nodes of autograd do.
    """

    start: Int[np.ndarray, " kernels"]
    end: Int[np.ndarray, " kernels"]
    launched: Int[np.ndarray, " kernels"]
    joined: Bool[np.ndarray, " kernels"]
    lane: Int[np.ndarray, " kernels"]
    activity: Int[np.ndarray, " kernels"]
    phase: Int[np.ndarray, " kernels"]
    name: Int[np.ndarray, " kernels"]
    message: Int[np.ndarray, " kernels"]
    sequence: Int[np.ndarray, " kernels"]
    main: Bool[np.ndarray, " kernels"]
    graph: Bool[np.ndarray, " kernels"]
    messages: tuple[Message, ...]
    ranges: tuple[RankOp, ...]
    parts: tuple[bool, ...]
    on_device: bool
    training: bool | None = None
    arrows: Int[np.ndarray, "2 arrows"] = dataclasses.field(
        default_factory=lambda: np.zeros((2, 0), np.int64)
    )

    @property
    def phases_known(self) -> bool:
        """Whether the phases of most of its compute are known."""
        lasts = (self.end - self.start) * (self.activity == COMPUTES)
        return bool(lasts @ (self.phase >= 0) > _KNOWN * lasts.sum())


def work_of(spans: Spans, names: RangeNames) -> Work:
    """What a rank ran, from its spans and the meaning of names."""
    collectives = np.array([_kind_of(name, names) for name in spans.names] or [""], object)
    on_device = bool(np.any(spans.kind == Kind.KERNEL))
    kernels = spans[spans.kind == Kind.KERNEL if on_device else _outermost(spans, names)]
    joined, graph = np.full((2, len(kernels)), [[not on_device], [False]])
    launched, lane = kernels.start, kernels.lane if not on_device else np.full(len(kernels), -1)
    host = spans[spans.kind == Kind.LAUNCH]
    if on_device and len(host):
        host = host[np.argsort(host.link, kind="stable")]
        place = np.minimum(np.searchsorted(host.link, kernels.link), len(host) - 1)
        joined = (host.link[place] == kernels.link) & (kernels.link != -1)
        launched = np.where(joined, host.start[place], launched)
        lane = np.where(joined, host.lane[place], -1)
        graph = host.named(lambda name: "GraphLaunch" in name)[place] & joined
    order = np.argsort(launched, kind="stable")
    kernels, launched, joined = kernels[order], launched[order], joined[order]
    copies = kernels.named(is_copy)
    talks = (kernels.message >= 0) | ((collectives[kernels.name] != "") & on_device)
    activity = np.where(talks, TALKS, np.where(copies, COPIES, COMPUTES))
    main = activity == COMPUTES if np.any(activity == COMPUTES) else activity >= 0
    if on_device:
        seconds = np.bincount(kernels.lane, (kernels.end - kernels.start) * main)
        main = (main | ~joined.any()) & (kernels.lane == np.argmax(seconds))
    times = (kernels.start, kernels.end, launched, joined, lane[order])
    labels = (kernels.name, kernels.message, kernels.sequence, main, graph[order], spans.messages)
    work = Work(*times, activity, kernels.phase, *labels, *_named(spans, names), on_device)
    message, messages = _messages(spans, work, collectives)
    phase = _phases(spans, work)
    trains = np.isin(phase, (BACKWARD, OPTIMIZE)).any() or np.any(spans.kind == Kind.BACKWARD)
    trains |= any(r.op == OPTIMIZER or r.op.startswith("backward") for r in work.ranges)
    # If the host was recorded, and runs no backward, this is no training.
    training = (
        True if trains else False if np.any((phase == FORWARD) & (activity == COMPUTES)) else None
    )
    arrows = spans[spans.kind == Kind.ARROW]
    arrows = arrows[~_in_nodes(spans, arrows.start, arrows.lane)]
    return dataclasses.replace(
        work,
        phase=phase,
        message=message,
        messages=messages,
        training=training,
        arrows=np.stack([arrows.start, arrows.end]),
    )


def _kind_of(name: str, names: RangeNames) -> str:
    """The collective that a kernel of this name runs; empty if it runs none."""
    for rule in names.kernels:
        if re.search(rule.kernel, name):
            return rule.collective
    if of_nccl := _NCCL.match(name):
        kind = collective_of(of_nccl[1])
        return "unknown" if kind == of_nccl[1] else kind
    if of_xla := _XLA.match(name):
        return "send_recv" if of_xla[1] == "collective-permute" else collective_of(of_xla[1])
    return next((kind for pattern, kind in _OTHERS if pattern.search(name)), "")


def _outermost(spans: Spans, names: RangeNames) -> Int[np.ndarray, " chosen"]:
    """The collectives of the host, and its operators that are not within another on their thread;
    without any operators its named ranges.
    """
    chosen = np.isin(spans.kind, (Kind.HOST_OP, Kind.BACKWARD)) & ~spans.waits()
    if not chosen.any():
        chosen = (spans.kind == Kind.RANGE) & spans.named(lambda name: bool(names.op_of(name)))
    outermost = [np.flatnonzero(spans.kind == Kind.MESSAGE)]
    for lane in np.unique(spans.lane[chosen]).tolist():
        on_lane = np.flatnonzero(chosen & (spans.lane == lane))
        on_lane = on_lane[np.lexsort((-spans.end[on_lane], spans.start[on_lane]))]
        until = np.maximum.accumulate(spans.end[on_lane])
        outermost.append(on_lane[np.append(True, spans.end[on_lane][1:] > until[:-1])])
    return np.concatenate(outermost)


def _named(spans: Spans, names: RangeNames) -> tuple[tuple[RankOp, ...], tuple[bool, ...]]:
    """The outermost ranges of each kind, in the order of their starts."""
    ranges, is_part = list[RankOp](), list[bool]()
    chosen = spans[spans.kind == Kind.RANGE]
    range_names = np.unique(chosen.name).tolist()
    ops_of = {i: names.op_of(spans.names[i]) for i in range_names}
    chosen = chosen[np.isin(chosen.name, [i for i in range_names if ops_of[i] is not None])]
    last: dict[str, int] = {}
    for i in np.lexsort((-chosen.end, chosen.start)).tolist():
        name = int(chosen.name[i])
        op = ops_of[name]
        assert op is not None
        ops, microbatch, stage = op
        start, end = int(chosen.start[i]), int(chosen.end[i])
        if end > last.get(ops, start):
            last[ops] = end
            for part in ops.split("+"):
                ranges.append(RankOp(-1, part, microbatch, stage, start, end))
                is_part.append(names.is_part(spans.names[name]))
    return tuple(ranges), tuple(is_part)


def _phases(spans: Spans, work: Work) -> Int[np.ndarray, " kernels"]:
    """The phase of each launch: the optimizer within its range; backward within a node of autograd
    on its thread, on a thread of autograd, or within a range of that name; else forward.
    """

    def inside(ops: tuple[str, ...]) -> Bool[np.ndarray, " kernels"]:
        bounds = [(r.start, r.end) for r in work.ranges if r.op in ops]
        return _inside(work.launched, *np.array(bounds, np.int64).reshape(-1, 2).T)

    in_nodes = _in_nodes(spans, work.launched, work.lane)
    backward = inside(tuple(op for op in COMPUTE if op.startswith("backward"))) | in_nodes
    for thread in np.unique(work.lane[in_nodes]).tolist():
        of_thread = work.lane == thread
        if in_nodes[of_thread].mean() > _MOST_IN_NODES:  # It is a thread of autograd.
            backward |= of_thread
    forward, optimizer = inside(COMPUTE[:1]), inside((OPTIMIZER, "optimizer-clip-main-grad"))
    if not backward.any() and not np.any(spans.kind == Kind.BACKWARD):
        # Of old files: the other thread's launches.
        backward = optimizer.any() & work.joined & ~np.isin(work.lane, work.lane[optimizer])
    phase = np.where(optimizer, OPTIMIZE, np.where(backward, BACKWARD, FORWARD))
    named = optimizer | backward | forward
    recorded = named.any() or np.isin(spans.kind, (Kind.HOST_OP, Kind.BACKWARD)).any()
    # What a graph runs is known by the range of its launch only, unless a backward is beside it;
    # and nothing is known without a host.
    is_known = named | (work.joined & (~work.graph | backward.any()) & recorded)
    return np.where(work.phase >= 0, work.phase, np.where(is_known, phase, -1))


def _in_nodes(
    spans: Spans, times: Int[np.ndarray, " times"], lanes: Int[np.ndarray, " times"]
) -> Bool[np.ndarray, " times"]:
    """Whether at each time the thread is in a node of autograd."""
    nodes, inside = spans[spans.kind == Kind.BACKWARD], np.zeros(len(times), bool)
    for thread in np.unique(nodes.lane).tolist():
        in_thread, nodes_of = lanes == thread, nodes[nodes.lane == thread]
        inside[in_thread] = _inside(times[in_thread], nodes_of.start, nodes_of.end)
    return inside


def _inside(times: Int[np.ndarray, " times"], start, end) -> Bool[np.ndarray, " times"]:
    """Whether each time lies in any of some spans."""
    order = np.argsort(start, kind="stable")
    start, until = start[order], np.maximum.accumulate(end[order])
    place = np.searchsorted(start, times, "right") - 1
    return (place >= 0) & (times < np.append(until, 0)[place])


def _messages(
    spans: Spans, work: Work, collectives: np.ndarray
) -> tuple[Int[np.ndarray, " kernels"], tuple[Message, ...]]:
    """The message of each kernel that communicates: its own or, without one, that of the host's
    last call on the thread of its launch since the launch of the collective before. Sends and
    receives without a pipeline are an all-to-all.
    """
    calls = spans[spans.kind == Kind.MESSAGE]
    calls = calls[np.argsort(calls.start, kind="stable")]
    sends = any(r.op in TRANSFERS or r.stage >= 0 for r in work.ranges)
    sends |= any(spans.messages[i].name in ("send", "recv") for i in np.unique(calls.message))
    number = {message: i for i, message in enumerate(spans.messages)}
    of_kernels, matched = work.message.copy(), dict.fromkeys(np.unique(work.lane).tolist(), 0)
    by_lane = {lane: np.flatnonzero(calls.lane == lane) for lane in matched}
    for i in np.flatnonzero(work.activity == TALKS).tolist():
        lane, kind = int(work.lane[i]), str(collectives[work.name[i]]) or "unknown"
        message = spans.messages[work.message[i]] if work.message[i] >= 0 else Message(kind)
        message = message if message.name in COLLECTIVES else message._replace(name=kind)
        unclear, on_lane = message.name in _UNCLEAR, by_lane[lane]
        earlier = int(np.searchsorted(calls.start[on_lane], work.launched[i], "right"))
        if work.message[i] < 0 or unclear:
            near = (spans.messages[calls.message[j]] for j in on_lane[matched[lane] : earlier])
            kinds = COLLECTIVES if unclear else (message.name,)
            alike = [called for called in near if called.name in kinds]
            message = max(
                alike, key=lambda called: (called.size > 0, called.members), default=message
            )
        matched[lane] = earlier
        if message.name == "send_recv" and not sends:
            message = message._replace(name="all_to_all")
        of_kernels[i] = number.setdefault(message, len(number))
    return of_kernels, tuple(number)


def covered(
    start: Int[np.ndarray, " spans"], end: Int[np.ndarray, " spans"]
) -> Callable[[Int[np.ndarray, " times"]], Float[np.ndarray, " times"]]:
    """How many nanoseconds before a time lie in any of some spans."""
    start, end = union(start, end)
    if not len(start):
        return lambda times: np.zeros(len(times))
    edges = np.stack([start, end], axis=1).reshape(-1)
    lasts = np.repeat(np.append(0.0, np.cumsum(end - start)), 2)[1:-1]
    first = edges[0]  # Nanoseconds of a clock have more digits than floats.
    return lambda times: np.interp((times - first).astype(float), (edges - first) * 1.0, lasts)


def covered_seconds(cover: Callable[[np.ndarray], np.ndarray], start, end) -> np.ndarray:
    """The seconds that are covered from each start to its end."""
    return (cover(end) - cover(start)) * 1e-9


def union(start, end) -> tuple[Int[np.ndarray, " spans"], Int[np.ndarray, " spans"]]:
    """The starts and ends of what some spans cover together."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    begins = np.append(True, start[1:] > end[:-1])[: len(start)]
    return start[begins], end[np.append(begins[1:], True)[: len(end)]]
