"""Compiles any graph of ops to a program."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._misc import check_type, quoted, whole_number
from .._ragged import ragged, row_numbers
from ..host import on_host
from ..latency import AbstractLatency
from ..schedule import SEND_RECV, OpGraph
from ..workload import Block, Kernel, Segment
from ._assemble import assemble
from ._program import Program, check_means, check_scale
from ._variability import Variability


# Of ranks and of microbatches: each has random numbers of its own.
_MOST = 2**16
# In seconds; the precision sets a lower limit.
_LONGEST = 1e100


@dataclasses.dataclass(frozen=True)
class Op:
    """An op of a graph for [`compile_graph`][]: which ops it waits for, and how long it takes.

    **Attributes:**

    - `latency`: the latency in seconds: a law, or a number. A number is the mean; the law around it
        is that of the op's kind in `variability`.
    - `after`: the ops that it waits for, by their positions in the list of ops.
    - `kind`: the name of its kind of kernel, whose laws differ by no more than a factor. By
        default, ops with equal laws are of one kind.
    - `rank`: the rank that it runs on (0, 1, ...). Each rank has a factor.
    - `microbatch`: the microbatch whose data it processes.
    - `link`: the link that communication uses. Communication does not have the factor of a rank.
        `None` for compute.
    """

    latency: AbstractLatency | float
    after: Sequence[int] = ()
    kind: str | None = None
    rank: int = 0
    microbatch: int = 0
    link: str | None = None


def compile_graph(
    ops: Sequence[Op],
    *,
    sinks: Sequence[int] | None = None,
    variability: Variability | None = None,
    num_replicas: int = 1,
    network_links: Sequence[str] = (),
) -> Program:
    """Compiles any graph of ops to a program.

    An op starts when all ops that it waits for have ended.

    ```python
    work = prism.latency.LogNormal(1.0, 0.2)
    program = prism.compile_graph(
        [
            prism.Op(work),
            prism.Op(work, after=[0]),
            prism.Op(1.5, after=[0]),
            prism.Op(0.1, after=[1, 2]),
        ]
    )
    prism.simulate(program, num_samples=100_000, key=jax.random.key(0)).quantile(0.95)
    ```

    **Arguments:**

    - `ops`: the ops. An op can only wait for ops before it in the list.
    - `sinks`: the positions of the ops whose latest end is the end of the step; by default all ops.
    - `variability`: shared factors, stalls, and the laws of kinds whose ops have only a mean.
    - `num_replicas`: how many copies of the graph run in parallel. The slowest ends the step.
    - `network_links`: the links that share the network's regime.

    **Returns:**

    A [`Program`][]. As in every program, the mean of a law is a parameter of its own, separate from
    the shape: derivatives with respect to means are in `latencies.mean`, those with respect to
    shapes in `variability.residual`.

    **Raises:**

    `ValueError` if there are no ops, an op waits for one that is not before it, a law is invalid,
    two ops of one kind have laws that differ by more than a factor, or a latency is beyond the
    precision: in single precision each is zero or at least 1.2e-38 s, and the longest is between
    8e-19 and 1e18 s.
    """
    check_type(ops, Sequence, "list of ops", "give `prism.Op` objects")
    if not ops:
        raise ValueError("A graph without ops has no step time; give at least one `Op`.")
    for position, op in enumerate(ops):
        _check_op(op, position)
    if sinks is not None and not (_are_positions(sinks, len(ops)) and len(sinks)):
        raise ValueError(
            f"`sinks={quoted(sinks)}` must hold positions of ops, 0 to {len(ops) - 1}; give at "
            "least one."
        )
    variability = Variability() if variability is None else variability
    if isinstance(network_links, str) or not (
        isinstance(network_links, Sequence) and all(isinstance(x, str) for x in network_links)
    ):
        raise ValueError(f"`network_links={quoted(network_links)}` must be a list of names.")
    check_type(variability, Variability, "variability", "use `prism.Variability(...)`")
    kinds, laws = _kinds(ops, variability)
    means, dtype = _means(ops), jnp.result_type(float)
    check_means(means, "Op {}".format, dtype)
    for position, (op, mean) in enumerate(zip(ops, means.tolist(), strict=True)):
        if isinstance(op.latency, AbstractLatency):
            if mean:
                check_scale(f"op {position}", mean, dtype)
            else:  # A latency that is always zero has no shape.
                laws.pop(kinds[position], None)
    by_law: dict[tuple[str, float, str | None], Block] = {}
    blocks = [
        by_law.get(parts) or by_law.setdefault(parts, _block(*parts))
        for parts in zip(kinds, means.tolist(), (op.link for op in ops), strict=True)
    ]
    return assemble(
        _graph(ops, sinks),
        blocks,
        variability=dataclasses.replace(variability, residual={**variability.residual, **laws}),
        num_replicas=whole_number(num_replicas, "num_replicas"),
        network_links=network_links,
    )


def _check_op(op: Op, position: int) -> None:
    """Raises a `ValueError` unless a graph may have this op at this position."""
    check_type(op, Op, "op", "use `prism.Op(latency, after=[...])`")
    number = isinstance(op.latency, int | float | np.number) and not isinstance(op.latency, bool)
    if not isinstance(op.latency, AbstractLatency) and (not number or op.latency >= _LONGEST):
        raise ValueError(
            f"Op {position} has the latency `{quoted(repr(op.latency))}`; give a law, such as "
            f"`prism.latency.LogNormal(1.0, 0.1)`, or a number of seconds below {_LONGEST:g}."
        )
    if not _are_positions(op.after, position):
        raise ValueError(
            f"Op {position} waits for {quoted(op.after)}; number the ops so that each waits for "
            "smaller numbers only, and give these as a list."
        )
    for name in ("kind", "link"):
        if getattr(op, name) is not None:
            check_type(getattr(op, name), str, f"{name} of op {position}", "give a name")
    for name in ("rank", "microbatch"):
        whole_number(getattr(op, name), f"{name} of op {position}", 0, _MOST)


def _are_positions(value: object, number: int) -> bool:
    return isinstance(value, Sequence | np.ndarray) and all(
        isinstance(x, int | np.integer) and not isinstance(x, bool) and 0 <= x < number
        for x in value
    )


def _kinds(
    ops: Sequence[Op], variability: Variability
) -> tuple[list[str], dict[str, AbstractLatency]]:
    """The kind of each op, and the law of each kind whose ops have one."""
    # By object first, for to look into a law is slow; then by value.
    number_of: dict[int, int] = {}
    numbers: dict[Any, int] = {}
    kinds: list[str] = []
    laws: dict[str, AbstractLatency] = {}
    unlike: dict[int, AbstractLatency] = {}
    for position, op in enumerate(ops):
        law = op.latency if isinstance(op.latency, AbstractLatency) else None
        if law is None:
            kinds.append(op.kind or "op")
            continue
        if id(law) not in number_of:
            if law.batch_shape:
                raise ValueError(
                    f"The law of op {position} has the batch shape {law.batch_shape}; give each op "
                    "one law without batch axes."
                )
            structure, values = _taken_apart(law)
            value = structure, *(x.tobytes() for x in values)
            number_of[id(law)] = numbers.setdefault(value, len(numbers))
        kinds.append(op.kind or f"law {number_of[id(law)]}")
        first = laws.setdefault(kinds[-1], variability.residual.get(kinds[-1], law))
        if number_of.get(id(first)) != number_of[id(law)]:
            unlike |= {id(first): first, id(law): law}
    shapes = _of_each(_each_shape, unlike.values())
    for position, (op, kind) in enumerate(zip(ops, kinds, strict=True)):
        if id(op.latency) in shapes and not _equal(shapes[id(laws[kind])], shapes[id(op.latency)]):
            raise ValueError(
                f"The law of op {position} is not that of its kind `{kind}`, at any scale; give "
                "the op another kind, or leave `kind` out."
            )
    return kinds, laws


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    least = 64 * float(np.finfo(np.result_type(first, second)).eps)
    return np.allclose(first, second, rtol=least, atol=least)


def _each_shape(laws: AbstractLatency) -> jax.Array:
    """Quantiles over the mean: all that a kind has, as means are of its kernels."""

    def shape(law):
        mean = law.mean()
        scores = jnp.asarray(np.linspace(-6, 6, 65), law.dtype)
        latencies = jax.vmap(law.from_normal)(scores)
        return latencies / jnp.where(mean == 0, 1, mean)

    return eqx.filter_vmap(shape)(laws)


def _of_each(
    function: Callable[[AbstractLatency], jax.Array], laws: Iterable[AbstractLatency]
) -> dict[int, Any]:
    """What a function gives for each law, by its `id`: by NumPy, for many laws at once."""
    alike: dict[Any, list[AbstractLatency]] = {}
    results: dict[int, Any] = {}
    for law in laws:
        alike.setdefault(_taken_apart(law)[0], []).append(law)
    for group in alike.values():
        stacked = jax.tree.map(lambda *x: np.stack(x) if eqx.is_array(x[0]) else x[0], *group)
        results.update(zip(map(id, group), np.asarray(on_host(function, stacked)), strict=True))
    return results


def _taken_apart(law: AbstractLatency) -> tuple[Any, list[np.ndarray]]:
    """What a law has in common with those that can be computed with beside it, and its values."""
    leaves, tree = jax.tree.flatten(law)
    values = [np.asarray(x) for x in leaves if eqx.is_array(x)]
    static = tuple((x.shape, x.dtype) if eqx.is_array(x) else x for x in leaves)
    return (tree, static), values


def _means(ops: Sequence[Op]) -> np.ndarray:
    """The mean of each op's latency, in seconds."""
    latencies = {id(op.latency): op.latency for op in ops}
    means = {key: x for key, x in latencies.items() if not isinstance(x, AbstractLatency)}
    laws = [law for law in latencies.values() if isinstance(law, AbstractLatency)]
    means |= _of_each(_each_mean, laws)
    return np.array([means[id(op.latency)] for op in ops], float)


def _each_mean(laws: AbstractLatency) -> jax.Array:
    return eqx.filter_vmap(lambda law: law.mean())(laws)


def _by_rank(rank: np.ndarray, ops: np.ndarray, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The ops of each rank, in the order in which they are given."""
    ends = np.cumsum(np.bincount(rank, minlength=ranks))
    parts = np.split(ops[np.argsort(rank, kind="stable")], ends[:-1])
    return tuple(tuple(part.tolist()) for part in parts)


def _block(kind: str, mean: float, link: str | None) -> Block:
    kernel = Kernel(kind, f"{mean:g} s", mean, link)
    alone = Segment(((kernel, 1),)) if link is None else Segment((), kernel)
    return ((alone, 1),)


def _graph(ops: Sequence[Op], sinks: Sequence[int] | None) -> OpGraph:
    rank, number = np.array([op.rank for op in ops]), len(ops)
    predecessors = tuple(tuple(op.after) for op in ops)
    ends = np.asarray(sinks)
    if sinks is None:
        # The end of a rank is that of the ops that no op of the rank waits for.
        before = ragged(predecessors)
        same = rank[before.values] == rank[row_numbers(before)]
        ends = np.delete(np.arange(number), before.values[same])
    none, ranks = np.full(number, -1), int(rank.max()) + 1
    return OpGraph(
        phase=np.where([op.link is None for op in ops], "F", SEND_RECV),
        stage=rank,
        microbatch=np.array([op.microbatch for op in ops]),
        rank=rank,
        peer=none,
        other_stage=none,
        other_microbatch=none,
        backward=np.zeros(number, bool),
        predecessors=predecessors,
        orders=_by_rank(rank, np.arange(number), ranks),
        last=_by_rank(rank[ends], ends, ranks),
    )
