"""From a graph of ops and the blocks they stand for to a program."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from .._misc import FrozenArray, unknown_name
from ..latency import Constant, check
from ..maxplus import to_levels
from ..schedule import OpGraph
from ..workload import Block, Kernel
from ._collapse import Blocks
from ._program import Ops, Program, Rows, Stratum
from ._table import LatencyTable
from ._variability import Variability


def assemble(
    graph: OpGraph,
    blocks: Sequence[Block],
    *,
    variability: Variability | None = None,
    reduce_scatter: Sequence[Block] = (),
    tail: Block = (),
    group_size: int = 1,
    num_replicas: int = 1,
    network_links: Sequence[str] = (),
    resolution: Literal["block", "kernel"] = "block",
) -> Program:
    """Makes a program of any graph of ops.

    **Arguments:**

    - `graph`: the ops of one replica, and what each waits for.
    - `blocks`: for each op, its kernels. An op that is one kernel keeps that kernel's law; the
        kernels of any other are collapsed to one latency.
    - `variability`: what makes latencies vary; nothing by default.
    - `reduce_scatter`: for each pipeline rank, the exposed reduction of gradients over replicas.
    - `tail`: what follows when all ranks of all replicas have met.
    - `group_size`: members of a tensor- and context-parallel group, who wait for one another at
        the collectives of a block.
    - `num_replicas`: data-parallel copies of the graph.
    - `network_links`: the links that share the network's regime.
    - `resolution`: `"kernel"` draws every kernel of every member instead of a block's latency.
        Slow; a check of the collapse.

    **Returns:**

    A [`Program`][].

    **Raises:**

    `ValueError` for counts below one, a law with impossible parameters, or a kind of kernel that
    `variability` names and no kernel has.
    """
    variability = Variability() if variability is None else variability
    if group_size < 1 or num_replicas < 1:
        raise ValueError(
            f"group_size={group_size} and num_replicas={num_replicas} must both be at least 1."
        )
    if resolution not in ("block", "kernel"):
        raise ValueError(f"`resolution={resolution!r}` must be 'block' or 'kernel'.")
    if reduce_scatter and len(reduce_scatter) != len(graph.orders):
        raise ValueError(
            f"{len(reduce_scatter)} blocks were given for the reduction of gradients; give one for "
            f"each of the {len(graph.orders)} pipeline ranks."
        )
    check_variability(variability)
    after = [block for block in (*reduce_scatter, tail) if block]
    kernels = _distinct(kernel for block in (*blocks, *after) for kernel in _kernels(block))
    table = _latency_table(list(kernels), variability, network_links)
    world_size = group_size * len(graph.orders) * num_replicas

    # A stage without layers has an empty block, which takes no time.
    classes = _distinct((b, group_size) for b in (*blocks, *filter(None, reduce_scatter)))
    if tail:
        classes[(tail, world_size)] = len(classes)
    laid_out, sequences = _lay_out(list(classes), kernels, table)

    rank = np.where(graph.phase == "SR", -1, graph.rank)
    pairs = [
        (c, int(r) if laid_out.compute.value[c] else -1)
        for c, r in zip((classes[(b, group_size)] for b in blocks), rank, strict=True)
    ]
    rows = _distinct(pairs)
    levels = to_levels(graph.predecessors, graph.last)
    residual = {k: variability.residual.get(k, Constant(jnp.ones(()))) for k in table.kinds}
    stalls = {k: stall for k, stall in variability.stalls.items() if k in table.kinds}
    variability = dataclasses.replace(variability, residual=residual, stalls=stalls)
    position = {kind: number for number, kind in enumerate(sorted(stalls))}
    entries = [
        (op, position[kernel.kind], calls)
        for op, block in enumerate(blocks)
        for kernel, calls in _calls(block, group_size).items()
        if kernel.kind in position
    ]
    return Program(
        latencies=table,
        variability=variability,
        levels=levels,
        ops=Ops(
            phase=FrozenArray(graph.phase),
            stage=FrozenArray(graph.stage),
            microbatch=FrozenArray(graph.microbatch),
            rank=FrozenArray(graph.rank),
            row=FrozenArray(np.array([rows[pair] for pair in pairs])),
        ),
        rows=Rows(
            class_=FrozenArray(np.array([c for c, _ in rows])),
            rank=FrozenArray(np.array([r for _, r in rows])),
        ),
        blocks=laid_out,
        sequences=sequences,
        reduce_scatter=FrozenArray(
            np.array(
                [classes[(b, group_size)] if b else -1 for b in reduce_scatter]
                or [-1] * len(graph.orders)
            )
        ),
        tail=classes[(tail, world_size)] if tail else -1,
        stall_ops=FrozenArray(np.array([op for op, _, _ in entries], np.int64)),
        stall_kinds=FrozenArray(np.array([kind for _, kind, _ in entries], np.int64)),
        stall_counts=FrozenArray(np.array([calls for _, _, calls in entries], np.int64)),
        strata=_strata(variability, entries),
        num_replicas=num_replicas,
        group_size=group_size,
        world_size=world_size,
        resolution=resolution,
    )


def _distinct(items) -> dict:
    return {item: number for number, item in enumerate(dict.fromkeys(items))}


def _kernels(block: Block):
    for segment, _ in block:
        yield from (kernel for kernel, _ in segment.kernels)
        if segment.collective is not None:
            yield segment.collective


def _calls(block: Block, members: int) -> dict[Kernel, int]:
    """How often a block calls each kernel: compute by every member, a collective once."""
    calls: dict[Kernel, int] = {}
    for segment, repeats in block:
        for kernel, count in segment.kernels:
            calls[kernel] = calls.get(kernel, 0) + repeats * count * members
        if segment.collective is not None:
            calls[segment.collective] = calls.get(segment.collective, 0) + repeats
    return calls


def check_variability(variability: Variability) -> None:
    """Raises a `ValueError` of one sentence if a law or a rate has impossible parameters."""
    laws = {f"residual of {kind}": law for kind, law in variability.residual.items()}
    laws |= {f"stall of {kind}": stall.size for kind, stall in variability.stalls.items()}
    for name in ("rank", "step", "microbatch"):
        law = getattr(variability, name)
        if law is not None:
            laws[f"{name} factor"] = law
    for name, law in laws.items():
        try:
            check(law)
        except ValueError as error:
            raise ValueError(f"The law of the {name} cannot be used: {error}") from None
    for kind, stall in variability.stalls.items():
        if not 0 <= float(stall.rate) < 1:
            raise ValueError(
                f"The stall rate of `{kind}` is {float(stall.rate)}; it counts stalls per call and "
                "must be at least 0 and below 1."
            )
    network = variability.network
    if network is not None and not (
        0 <= float(network.probability) < 1 and float(network.slowdown) > 0
    ):
        raise ValueError(
            f"The network is congested with probability {float(network.probability)} and slowdown "
            f"{float(network.slowdown)}; give a probability in [0, 1) and a positive slowdown."
        )


def _latency_table(
    kernels: Sequence[Kernel], variability: Variability, network_links: Sequence[str]
) -> LatencyTable:
    kinds = _distinct(kernel.kind for kernel in kernels)
    for kind in (*variability.residual, *variability.stalls):
        if kind not in kinds and kind not in KINDS:
            raise ValueError(unknown_name("kind of kernel", kind, (*kinds, *KINDS)))
    bad = [k for k in kernels if not (np.isfinite(k.mean) and k.mean >= 0)]
    if bad:
        raise ValueError(
            f"Kernel {bad[0].kind} {bad[0].size} has a mean latency of {bad[0].mean} s; it must be "
            "finite and not negative."
        )
    return LatencyTable(
        mean=jnp.asarray(np.array([kernel.mean for kernel in kernels]), jnp.result_type(float)),
        kinds=tuple(kinds),
        kind=FrozenArray(np.array([kinds[kernel.kind] for kernel in kernels])),
        sizes=tuple(kernel.size for kernel in kernels),
        on_network=FrozenArray(np.array([k.link in network_links for k in kernels], bool)),
    )


# Kinds that a variability profile may name although a job has no such kernel.
KINDS = (
    "gemm",
    "attention",
    "elementwise",
    "norm",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "embedding",
    "loss",
    "optimizer",
)


def _lay_out(
    classes: Sequence[tuple[Block, int]], kernels: Mapping[Kernel, int], table: LatencyTable
) -> tuple[Blocks, tuple[FrozenArray, ...]]:
    """The static matrices of the collapse, and each class as a sequence for `"kernel"`."""
    segments: dict[tuple, int] = {}
    class_segments: list[dict[int, int]] = []
    collectives = np.zeros((len(classes), len(kernels)), np.int64)
    direct = np.full(len(classes), -1, np.int64)
    compute = np.zeros(len(classes), bool)
    sequences = []
    for c, (block, members) in enumerate(classes):
        contains: dict[int, int] = {}
        sequence = []
        for segment, repeats in block:
            if segment.kernels:
                compute[c] = True
                s = segments.setdefault((segment.kernels, members), len(segments))
                contains[s] = contains.get(s, 0) + repeats
            run = [(kernels[k], 0) for k, count in segment.kernels for _ in range(count)]
            if segment.collective is not None:
                k = kernels[segment.collective]
                collectives[c, k] += repeats
                run.append((k, 1))
            elif run:
                run.append((-1, 1))
            sequence.extend(run * repeats)
        class_segments.append(contains)
        sequences.append(FrozenArray(np.array(sequence, np.int64).reshape(-1, 2)))
        calls = _calls(block, 1)
        if sum(calls.values()) == 1 and (members == 1 or not compute[c]):
            direct[c] = kernels[next(iter(calls))]
    counts = np.zeros((len(segments), len(kernels)), np.int64)
    for (run, _), s in segments.items():
        for kernel, count in run:
            counts[s, kernels[kernel]] += count
    contained = np.zeros((len(classes), len(segments)), np.int64)
    for c, contains in enumerate(class_segments):
        for s, count in contains.items():
            contained[c, s] = count
    blocks = Blocks(
        segments=FrozenArray(counts),
        members=FrozenArray(np.array([members for _, members in segments], np.int64)),
        class_segments=FrozenArray(contained),
        class_collectives=FrozenArray(collectives),
        direct=FrozenArray(direct),
        compute=FrozenArray(compute),
    )
    return blocks, tuple(sequences)


def _strata(variability: Variability, entries) -> tuple[Stratum, ...]:
    """Half of the samples follow the law; the other half is spread over what is rare."""
    regimes = np.ones(1)
    if variability.network is not None:
        congested = float(variability.network.probability)
        regimes = np.array([1 - congested, congested])
        regimes = (regimes + 0.5) / 2
    kinds = sorted(variability.stalls)
    rate = sum(float(variability.stalls[kinds[kind]].rate) * calls for _, kind, calls in entries)
    stalls = np.ones(1)
    if entries:
        if rate > 20:
            raise ValueError(
                f"A replica's step has {rate:.3g} stalls on average; stalls are rare pauses, so "
                "lower their rates to a few per step or put them into the residual law."
            )
        # As many as a step could show: the rest has a probability of less than 1e-9.
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
