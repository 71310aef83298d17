"""When the ops of a graph run on the host, with given latencies."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from .._misc import check_type
from ._base import AbstractSchedule
from ._custom import CustomSchedule
from ._graph import OpGraph, op_graph
from ._ops import OVERLAPPED, PHASES, SEND_RECV, actions_of


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """When each op of a step runs, if every cost is given.

    **Attributes:**

    - `makespan`: the end of the last op. All times are in the unit of the costs, and start at zero.
    - `op`, `start`, `end`: for each rank, the tokens of its ops in the order in which it runs them,
        and when each op starts and ends.
    - `rank_ends`: the end of each rank, including its last send_recv if send_recvs block.
    - `busy`: for how long each rank computes.
    """

    makespan: float
    op: tuple[list[str], ...]
    start: tuple[Float[np.ndarray, "..."], ...]
    end: tuple[Float[np.ndarray, "..."], ...]
    rank_ends: Float[np.ndarray, "ranks"]
    busy: Float[np.ndarray, "ranks"]


def evaluate(
    schedule: AbstractSchedule,
    *,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike | None = None,
    backward_input: npt.ArrayLike | None = None,
    backward_weight: npt.ArrayLike | None = None,
    overlap: str = "sum",
    send_recv: npt.ArrayLike = 0.0,
    blocking: bool = False,
) -> Timeline:
    """Computes when the ops of one step of a schedule run, with given costs.

    Costs are in seconds or any other unit. Integer costs give exact integer times.

    **Arguments:**

    - `schedule`: any schedule.
    - `forward`: the cost of a forward: a scalar, or an array over (stages, microbatches).
    - `backward`: the cost of a whole backward, likewise. Default
        `backward_input + backward_weight`.
    - `backward_input`, `backward_weight`: the costs of the two halves of a split backward,
        likewise.
    - `overlap`: whether an overlapped pair costs the `"sum"` or the `"max"` of its two parts.
    - `send_recv`: the cost of sending a tensor: a scalar, or an array over (sending rank, receiving
        rank). Sending between stages on the same rank costs nothing.
    - `blocking`: whether send_recvs block compute. A blocking send_recv starts when both ranks have
        reached it, and holds up both, as in Megatron-LM's 1F1B without interleaving.

    The axis of stages or of microbatches may have length 1. For a `CustomSchedule`, which has only
    the microbatches that its orders name, arrays may have more microbatches than that.

    **Returns:**

    A [`prism_jax.schedules.Timeline`][].
    """
    check_type(schedule, AbstractSchedule, "schedule", "use a class such as `OneFOneB(8, 32)`")
    if overlap not in ("sum", "max"):
        raise ValueError(f"`overlap={overlap!r}` is unknown; use 'sum' or 'max'.")
    tables = {
        "F": _table("forward", forward, schedule),
        "B": _table("backward", backward, schedule),
        "I": _table("backward_input", backward_input, schedule),
        "W": _table("backward_weight", backward_weight, schedule),
    }
    if tables["B"] is None and tables["I"] is not None and tables["W"] is not None:
        tables["B"] = tables["I"] + tables["W"]
    links = _links(send_recv, schedule.num_ranks)
    graph = op_graph(schedule, blocking=blocking)
    latency = _latencies(graph, tables, links, overlap == "max")
    starts, ends = replay(graph.predecessors, latency)
    tokens = [action.token for action in actions_of(graph)]
    return Timeline(
        makespan=float(ends.max()),
        op=tuple([tokens[op] for op in order] for order in graph.orders),
        start=tuple(starts[list(order)] for order in graph.orders),
        end=tuple(ends[list(order)] for order in graph.orders),
        rank_ends=_latest(ends, graph.last),
        busy=np.array([latency[list(order)].sum() for order in graph.orders]),
    )


def _latencies(
    graph: OpGraph, tables: dict[str, np.ndarray | None], links: np.ndarray, longest: bool
) -> np.ndarray:
    latency = np.zeros(graph.num_ops)
    stages = graph.stage, graph.other_stage
    microbatches = graph.microbatch, graph.other_microbatch
    for phase in np.unique(graph.phase):
        at = graph.phase == phase
        if phase == SEND_RECV:
            latency[at] = links[graph.rank[at], graph.peer[at]]
            continue
        parts = []
        for part, stage, microbatch in zip(str(phase), stages, microbatches, strict=False):
            table = tables[part]
            if table is None:
                name = PHASES[part].replace("-", "_")
                raise ValueError(f"The schedule has {part} ops but no `{name}`; give their cost.")
            parts.append(table[stage[at], microbatch[at]])
        latency[at] = np.maximum(*parts) if longest and phase == OVERLAPPED else sum(parts)
    return latency


def _table(
    name: str, cost: npt.ArrayLike | None, schedule: AbstractSchedule
) -> Float[np.ndarray, "stages microbatches"] | None:
    if cost is None:
        return None
    table = _numbers(name, cost)
    shape = schedule.num_stages, schedule.num_microbatches
    if isinstance(schedule, CustomSchedule) and table.ndim == 2:
        table = table[:, : shape[1]]
    if table.ndim not in (0, 2) or any(
        n not in (1, m) for n, m in zip(table.shape, shape, strict=False)
    ):
        raise ValueError(
            f"`{name}` has the shape {np.shape(cost)}; give a scalar, or an array over (stages, "
            f"microbatches), here {shape}."
        )
    _check_values(name, table)
    return np.broadcast_to(table, shape)


def _links(send_recv: npt.ArrayLike, num_ranks: int) -> Float[np.ndarray, "ranks ranks"]:
    links = _numbers("send_recv", send_recv)
    if links.shape not in ((), (num_ranks, num_ranks)):
        raise ValueError(
            f"`send_recv` has the shape {links.shape}; give a scalar, or an array over (from rank, "
            f"to rank), here {(num_ranks, num_ranks)}."
        )
    links = np.broadcast_to(links, (num_ranks, num_ranks))
    # A rank does not send to itself, so the diagonal is ignored.
    links = np.where(np.eye(num_ranks, dtype=bool), 0.0, links)
    _check_values("send_recv", links)
    return links


def _numbers(name: str, cost: npt.ArrayLike) -> np.ndarray:
    try:
        return np.asarray(cost, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` is not a number or an array of numbers; give finite costs, 0 or more."
        ) from None


def _check_values(name: str, cost: np.ndarray) -> None:
    bad = ~(np.isfinite(cost) & (cost >= 0))
    if bad.any():
        at = tuple(int(i[0]) for i in np.nonzero(bad)) if cost.ndim else ()
        where = f" at {at}" if at else ""
        raise ValueError(
            f"`{name}` is {cost[at]}{where}, but a cost is finite and not negative; use 0 or more."
        )


def replay(
    predecessors: Sequence[Sequence[int]], latencies: Float[np.ndarray, "ops *steps"]
) -> tuple[Float[np.ndarray, "ops *steps"], Float[np.ndarray, "ops *steps"]]:
    """When ops start and end: each starts when all ops that it waits for have ended.

    **Arguments:**

    - `predecessors`: for each op, the ops before it in the list that it waits for.
    - `latencies`: of each op, in one step or in several at once.

    **Returns:**

    The starts and the ends, from zero.
    """
    single = latencies.ndim == 1
    zero = 0.0 if single else np.zeros(latencies.shape[1:])
    latest = max if single else np.maximum.reduce  # One at a time, Python's numbers are faster.
    starts, ends = [], []
    for before, latency in zip(
        predecessors, latencies.tolist() if single else latencies, strict=True
    ):
        if len(before) == 1:  # A fast path for most ops, which halves the time.
            start = ends[before[0]]
        else:
            start = latest([ends[op] for op in before]) if before else zero
        starts.append(start)
        ends.append(start + latency)
    return np.array(starts), np.array(ends)


def group_ends(
    graph: OpGraph, latencies: Float[np.ndarray, " ops"], groups: Sequence[Sequence[int]]
) -> Float[np.ndarray, " groups"]:
    """When each of some groups of ops has ended, if every op starts as soon as it can."""
    _, ends = replay(graph.predecessors, latencies)
    return _latest(ends, groups)


def _latest(ends: np.ndarray, groups: Sequence[Sequence[int]]) -> Float[np.ndarray, " groups"]:
    return np.array([ends[list(ops)].max(initial=0.0) for ops in groups])
