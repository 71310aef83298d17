"""From any graph of ops to a program."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..latency import AbstractLatency
from ..schedule import SEND_RECV, OpGraph
from ..workload import Block, Kernel, Segment
from ._assemble import assemble
from ._program import Program
from ._variability import Variability


@dataclasses.dataclass(frozen=True)
class Op:
    """An op of a graph: what it waits for, and how long it takes.

    **Attributes:**

    - `latency`: in seconds: a law, or a number, the mean, around which the op varies as
        `variability` says of its kind.
    - `after`: the positions, in the list of ops, of those that it waits for.
    - `kind`: the name of its kind of kernel; ops with a law are of one kind if they share it.
    - `rank`: where it runs: one of the ranks 0, 1, ... with a factor each.
    - `microbatch`: whose data it is for.
    - `link`: of communication, what it goes over; it has no factor of a rank. `None`: it computes.
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
    """Compiles any graph of ops, with a law for each.

    An op starts when the last that it waits for has ended.

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

    - `ops`: each waits for ops that stand before it.
    - `sinks`: the positions of the ops whose latest end is that of the step; by default of all.
    - `variability`: what ops share, stalls, and the laws of kinds whose ops have a mean only.
    - `num_replicas`: copies of the graph of which the slowest ends the step.
    - `network_links`: the links that share the network's regime.

    **Returns:**

    A [`Program`][]. As in every program the mean of a law is kept apart from its shape: derivatives
    by means are those of `latencies.mean`, by shapes those of `variability.residual`.

    **Raises:**

    `ValueError` where there is no op, one waits for what does not stand before it, a law is
    impossible, or two ops of one kind have different laws.
    """
    if not ops:
        raise ValueError("A graph without ops has no step time; give at least one `Op`.")
    for position, op in enumerate(ops):
        if op.rank < 0 or op.microbatch < 0:
            raise ValueError(
                f"Op {position} has rank {op.rank} and microbatch {op.microbatch}; count both from "
                "0."
            )
    if sinks is not None and not (sinks and set(sinks) <= set(range(len(ops)))):
        raise ValueError(
            f"`sinks={list(sinks)}` must hold positions of ops, 0 to {len(ops) - 1}, one at least."
        )
    variability = Variability() if variability is None else variability
    kinds, laws = _kinds(ops, variability)
    blocks = [_block(op, kind) for op, kind in zip(ops, kinds, strict=True)]
    return assemble(
        _graph(ops, sinks),
        blocks,
        variability=dataclasses.replace(variability, residual={**variability.residual, **laws}),
        num_replicas=num_replicas,
        network_links=network_links,
    )


def _kinds(
    ops: Sequence[Op], variability: Variability
) -> tuple[list[str], dict[str, AbstractLatency]]:
    """The kind of each op, and the law of each kind whose ops have one."""
    numbers: dict[int, int] = {}
    kinds, laws = [], {}
    for position, op in enumerate(ops):
        law = op.latency if isinstance(op.latency, AbstractLatency) else None
        if law is None:
            kinds.append(op.kind or "op")
            continue
        if law.batch_shape:
            raise ValueError(
                f"The law of op {position} has the batch shape {law.batch_shape}; give each op one "
                "law without batch axes."
            )
        kind = op.kind or f"law {numbers.setdefault(id(law), len(numbers))}"
        if kind in variability.residual or laws.setdefault(kind, law) is not law:
            raise ValueError(
                f"The law of op {position} is not the only one of its kind `{kind}`; give its ops "
                "the same law, or a kind of its own."
            )
        kinds.append(kind)
    # What never takes any time has no shape.
    return kinds, {kind: law for kind, law in laws.items() if float(law.mean()) != 0}


def _block(op: Op, kind: str) -> Block:
    law = isinstance(op.latency, AbstractLatency)
    mean = float(op.latency.mean() if law else op.latency)  # pyright: ignore
    kernel = Kernel(kind, f"{mean:g} s", mean, op.link)
    alone = Segment(((kernel, 1),)) if op.link is None else Segment((), kernel)
    return ((alone, 1),)


def _graph(ops: Sequence[Op], sinks: Sequence[int] | None) -> OpGraph:
    rank = np.array([op.rank for op in ops])
    if sinks is None:
        # The end of a rank is that of the ops that no op of the rank waits for.
        inner = {(p, op.rank) for op in ops for p in op.after}
        sinks = [p for p, op in enumerate(ops) if (p, op.rank) not in inner]
    none = np.full(len(ops), -1)
    ranks = range(rank.max() + 1)
    return OpGraph(
        phase=np.array(["F" if op.link is None else SEND_RECV for op in ops]),
        stage=rank,
        microbatch=np.array([op.microbatch for op in ops]),
        rank=rank,
        peer=none,
        other_stage=none,
        other_microbatch=none,
        backward=np.zeros(len(ops), bool),
        predecessors=tuple(tuple(op.after) for op in ops),
        orders=tuple(tuple(np.flatnonzero(rank == r).tolist()) for r in ranks),
        last=tuple(tuple(p for p in sinks if rank[p] == r) for r in ranks),
    )
