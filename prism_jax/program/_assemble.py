"""Assembles a program from a graph of ops and their blocks."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from .._misc import unknown_name, whole_number
from .._ragged import ragged, row_numbers, take
from ..host import on_host
from ..latency import Constant
from ..lowering import Sink
from ..maxplus import to_levels
from ..schedule import OpGraph
from ..workload import Block, Kernel, rows_of
from ._blocks import count_calls, count_layers, expert_loads, lay_out_blocks
from ._program import LatencyTable, Ops, Program, Rows, Sinks, Stratum, check_means
from ._variability import Sets, Variability, check_variability


# GPUs, and copies of the pipeline, are counted in 32 bits.
_MOST = 2**31 - 1
# Of more ranks that reduce nothing, a sample keeps the latest end only.
_MOST_RANKS_APART = 16


def assemble(
    graph: OpGraph,
    blocks: Sequence[Block],
    *,
    variability: Variability | None = None,
    sinks: Sequence[Sink] = (),
    contention: float = 0.0,
    tail: Block = (),
    members: int | None = None,
    group_size: int = 1,
    num_replicas: int = 1,
    network_links: Sequence[str] = (),
) -> Program:
    """Makes a program from any graph of ops.

    **Arguments:**

    - `graph`: the ops of one replica, and the ops that each waits for.
    - `blocks`: the kernels of each op. An op with one kernel keeps that kernel's law; several
        kernels are collapsed to one latency.
    - `variability`: the laws around the means; by default nothing varies.
    - `sinks`: the gradient reductions over replicas, as from `sinks_of`; by default none.
    - `contention`: the part of its own latency that a reduction adds to the compute that it
        overlaps.
    - `tail`: the block that runs after all ranks of all replicas have met.
    - `members`: the number of members of a tensor- and context-parallel group, which wait for one
        another at the collectives of a block, unless a segment gives another number; by default
        `group_size`.
    - `group_size`: the number of GPUs in each pipeline rank.
    - `num_replicas`: how many copies of the graph there are, which meet only at the end of a step.
    - `network_links`: the links that share the network's regime.

    **Returns:**

    A [`Program`][].

    **Raises:**

    `ValueError` for counts that do not fit or are below one, for a law with invalid parameters, or
    if `variability` names a kind that no kernel has.
    """
    variability = Variability() if variability is None else variability
    sinks = sinks or [Sink(rank, last) for rank, last in enumerate(graph.last)]
    _check_arguments(graph, blocks, sinks, group_size, num_replicas)
    check_variability(variability)
    if len(sinks) > _MOST_RANKS_APART and not any(sink.reduction for sink in sinks):
        # No rank waits for other replicas before the end: its own end makes no difference.
        sinks = [Sink(-1, tuple(dict.fromkeys(op for sink in sinks for op in sink.ops)))]
    different, block_of_op = _number_blocks(blocks)
    reduced = [sink.reduction for sink in sinks]
    after = [block for block in (*reduced, tail) if block]
    kernels = _number(kernel for block in (*different, *after) for kernel in _kernels(block))
    table = _latency_table(list(kernels), variability, network_links)
    variability = _of_kinds(variability, table.kinds)

    # The class of an op has the number of its block. A stage without layers has an empty block,
    # which takes no time.
    world_size = group_size * graph.num_ranks * num_replicas
    members = group_size if members is None else members
    if isinstance(variability.microbatch, Sets) and members < group_size:
        variability = dataclasses.replace(variability, microbatch=variability.microbatch.apart())
    classes = _number((b, members) for b in (*different, *filter(None, reduced)))
    if tail:
        classes.setdefault((tail, world_size), len(classes))
    laid_out = lay_out_blocks(list(classes), kernels)
    reductions = [classes[(b, members)] if b else -1 for b in reduced]
    ranks = np.array([sink.rank for sink in sinks])

    layers = np.zeros(len(laid_out.compute), np.int64)
    layers[: len(different)] = _layers(graph, different, block_of_op)
    loads = expert_loads(list(kernels), layers, table.mean.dtype)
    ops, rows = _rows(graph, block_of_op, laid_out.compute)
    stall_ops, stall_kinds, stall_counts = _stalls(variability, different, block_of_op, group_size)
    return Program(
        latencies=table,
        variability=variability,
        levels=to_levels(graph.predecessors, [sink.ops for sink in sinks]),
        ops=ops,
        rows=rows,
        blocks=laid_out,
        sinks=Sinks(
            rank=ranks,
            reduction=np.array(reductions),
            first=np.searchsorted(ranks, ranks),
            is_last=np.diff(ranks, append=-2) != 0,
            contention=contention,
            number=len(ranks),
        ),
        tail=classes[(tail, world_size)] if tail else -1,
        stall_ops=stall_ops,
        stall_kinds=stall_kinds,
        stall_counts=stall_counts,
        strata=_make_strata(variability, stall_kinds, stall_counts),
        num_ops=graph.num_ops,
        num_ranks=int(graph.rank.max(initial=0)) + 1,
        num_microbatches=int(graph.microbatch.max(initial=0)) + 1,
        num_replicas=num_replicas,
        group_size=group_size,
        worker_size=min(members, group_size),
        world_size=world_size,
        loads=loads,
    )


def _check_arguments(
    graph: OpGraph,
    blocks: Sequence[Block],
    sinks: Sequence[Sink],
    group_size: int,
    num_replicas: int,
) -> None:
    """Raises a `ValueError` of one sentence for arguments that do not fit."""
    whole_number(group_size, "group_size", most=_MOST)
    whole_number(num_replicas, "num_replicas", most=_MOST)
    if len(blocks) != graph.num_ops:
        raise ValueError(
            f"{len(blocks)} blocks were given for the ops; give one for each of the "
            f"{graph.num_ops} ops of the graph."
        )
    ranks = [sink.rank for sink in sinks]
    if ranks != sorted(ranks) or set(ranks) != set(range(graph.num_ranks)):
        raise ValueError(
            f"The sinks are of the ranks {ranks}; give some for each of the {graph.num_ranks} "
            "pipeline ranks, one rank after the other."
        )


def _number(items: Iterable) -> dict:
    """The distinct items with their numbers, in the order in which they appear."""
    return {item: number for number, item in enumerate(dict.fromkeys(items))}


def _number_blocks(blocks: Sequence[Block]) -> tuple[list[Block], np.ndarray]:
    """The distinct blocks, and for each op the number of its block."""
    # Many ops share one object, and hashing a block is slow: so first by object, then by value.
    blocks = tuple(blocks)
    objects = {id(block): block for block in blocks}
    different = _number(objects.values())
    numbers = {key: different[block] for key, block in objects.items()}
    return list(different), np.array([numbers[id(block)] for block in blocks], np.int64)


def _layers(graph: OpGraph, different: Sequence[Block], block_of_op: np.ndarray) -> np.ndarray:
    """For each block, how many layers of its stage have uneven loads: as many as in the stage's
    forward, or else in the block; zero for a block without any.
    """
    counts = np.array([count_layers(block) for block in different], np.int64)
    forward = graph.phase == "F"
    of_stages = dict(zip(graph.stage[forward], counts[block_of_op[forward]], strict=True))
    _, first = np.unique(block_of_op, return_index=True)
    of_blocks = [of_stages.get(graph.stage[op], n) for op, n in zip(first, counts, strict=True)]
    return np.where(counts > 0, of_blocks, 0)


def _kernels(block: Block) -> Iterator[Kernel]:
    for segment, _ in block:
        for row, _ in rows_of(segment):
            yield from (kernel for kernel, _ in row)


def _of_kinds(variability: Variability, kinds: Sequence[str]) -> Variability:
    """The same laws, with a residual law for each of these kinds, and only stalls of these."""
    none = Constant(1.0)
    residual = {k: variability.residual.get(k, none) for k in kinds}
    stalls = {k: stall for k, stall in variability.stalls.items() if k in kinds}
    return dataclasses.replace(variability, residual=residual, stalls=stalls)


def _rows(graph: OpGraph, class_: np.ndarray, compute: np.ndarray) -> tuple[Ops, Rows]:
    """The ops and rows. Pairs of class and rank are numbered in the order of their first ops."""
    slowed = compute[class_] & ~graph.is_send_recv
    rank = np.where(slowed, graph.rank, -1)
    pairs = class_ * (graph.rank.max(initial=0) + 2) + rank + 1
    _, first, pair = np.unique(pairs, return_index=True, return_inverse=True)
    by_first = np.argsort(first)
    ops = Ops(
        phase=tuple(graph.phase.tolist()),
        stage=graph.stage,
        microbatch=graph.microbatch,
        rank=graph.rank,
        row=np.argsort(by_first)[pair],
    )
    first = first[by_first]
    return ops, Rows(class_=class_[first], rank=rank[first])


def _latency_table(
    kernels: Sequence[Kernel], variability: Variability, network_links: Sequence[str]
) -> LatencyTable:
    kinds = _number(kernel.kind for kernel in kernels)
    for kind in (*variability.residual, *variability.stalls):
        if kind not in kinds and kind not in KINDS:
            raise ValueError(unknown_name("kind of kernel", kind, (*kinds, *KINDS)))
    mean, dtype = np.array([kernel.mean for kernel in kernels]), jnp.result_type(float)
    check_means(mean, lambda k: f"Kernel {kernels[k].kind} {kernels[k].size}", dtype)
    return LatencyTable(
        mean=jax.device_put(mean.astype(dtype)),
        kinds=tuple(kinds),
        kind=tuple(kinds[kernel.kind] for kernel in kernels),
        sizes=tuple(kernel.size for kernel in kernels),
        on_network=np.array([k.link in network_links for k in kernels], bool),
    )


# Kinds that a variability profile may name although a job has no such kernel.
KINDS = (
    *("gemm", "convolution", "attention", "elementwise", "norm", "embedding", "loss", "optimizer"),
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"),
    *("copies", "host"),
)


def _stalls(
    variability: Variability,
    different: Sequence[Block],
    block_of_op: Int[np.ndarray, "ops"],
    group_size: int,
) -> tuple[np.ndarray, ...]:
    """The kernels that may stall in ops whose blocks are `different[block_of_op]`, op after op: the
    op of each, the position of its kind, and its number of calls by all members.
    """
    position = {kind: number for number, kind in enumerate(sorted(variability.stalls))}
    stalling = [
        [
            (position[kernel.kind], calls)
            for kernel, calls in count_calls(block, group_size).items()
            if kernel.kind in position
        ]
        for block in different
    ]
    kinds = take(ragged([[kind for kind, _ in row] for row in stalling]), block_of_op)
    calls = take(ragged([[calls for _, calls in row] for row in stalling]), block_of_op)
    return row_numbers(kinds), kinds.values, calls.values


def _make_strata(
    variability: Variability, kind: Int[np.ndarray, "stalls"], calls: Int[np.ndarray, "stalls"]
) -> tuple[Stratum, ...]:
    """The strata: half of the samples follow the law, the other half is spread over rare events."""
    regimes = np.ones(1)
    if variability.network is not None:
        network = variability.network
        regimes = np.asarray(on_host(type(network).probabilities, network), np.float64)
        regimes = (regimes + 1 / len(regimes)) / 2
    stalls = np.ones(1)
    if len(kind):
        rates = [float(stall.rate) for _, stall in sorted(variability.stalls.items())]
        rate = float(np.bincount(kind, calls, len(rates)) @ rates)
        if rate > 20:
            raise ValueError(
                f"A replica's step has {rate:.3g} stalls on average; stalls are rare pauses, so "
                "lower their rates to a few per step or put them into the residual law."
            )
        # Up to the number of stalls beyond which the probability is below 1e-9.
        law = [math.exp(-rate)]
        while len(law) < 3 or 1 - sum(law) > 1e-9:
            law.append(law[-1] * rate / len(law))
        counts = np.arange(len(law))
        law = np.array(law) / sum(law)
        rare = np.where(counts > 0, 0.5**counts, 0)
        stalls = (law + rare / rare.sum()) / 2
    return tuple(
        Stratum(regime=g, stalls=k, share=float(regimes[g] * stalls[k]))
        for g in range(len(regimes))
        for k in range(len(stalls))
    )
