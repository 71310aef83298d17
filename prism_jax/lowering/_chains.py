"""Schedules of several chains of stages, each of which is the whole model."""

import dataclasses
import itertools as it
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..schedule import AbstractSchedule, OpGraph, phases_of
from ..workload import Block, Costs, Reduction, Segment, Workload, lower


def lower_chains(job: Costs, schedule: AbstractSchedule) -> Workload:
    """`lower`, for a schedule that may have several chains, such as DualPipe.

    A rank holds a copy of the parameters for each chain. The copies of a stage reduce their
    gradients together, over all replicas, and share the optimizer's states.
    """
    runs = phases_of(schedule)
    chains = [lower(job, ranks, runs) for ranks in schedule.ranks_of_chains]
    if len(chains) == 1:
        return chains[0]
    if job.training.accumulate_gradients:
        raise ValueError(
            "the schedule has two copies of the model, whose gradients cannot be accumulated in "
            "turn; leave `training.accumulate_gradients` false, or use a schedule of one copy."
        )
    copies = msgspec.structs.replace(job.layout, dp=job.layout.dp * len(chains))
    of_copies = msgspec.structs.replace(job, layout=copies)
    passes = [one.passes for one in chains if one.passes is not None]
    reduced = [lower(of_copies, ranks, runs) for ranks in schedule.ranks_of_chains]
    phases = ("forward", "backward", "backward_input", "backward_weight")
    pairs = msgspec.structs.replace(passes[0], **_joined(passes, phases[:2])) if passes else None
    return msgspec.structs.replace(
        chains[0],
        **_joined(chains, (*phases, "model_flop")),
        passes=pairs,
        send_recv={pair: kernel for one in chains for pair, kernel in one.send_recv.items()},
        reductions=tuple(
            tuple(
                _of_copies(one, schedule.chain_starts, chain)
                for chain, reductions in enumerate(of_rank)
                for one in reductions
            )
            for of_rank in zip(*(one.reductions for one in reduced), strict=True)
        ),
        # What a step has besides its kernels, it has once.
        tail=(*reduced[0].tail, *it.chain(*(_without_host(one.tail) for one in reduced[1:]))),
    )


def _joined(chains: Sequence[Any], phases: Sequence[str]) -> dict[str, tuple]:
    """What the stages of each chain have in some phases, of all chains."""
    return {name: tuple(it.chain(*(getattr(one, name) for one in chains))) for name in phases}


def _without_host(block: Block) -> Block:
    def kept(one: Segment) -> Segment:
        kernels = tuple(row for row in one.kernels if row[0].kind != "host")
        return msgspec.structs.replace(one, kernels=kernels)

    return tuple((kept(one), times) for one, times in block)


def _of_copies(one: Reduction, chain_starts: Sequence[int], chain: int) -> Reduction:
    """A reduction of one chain that also waits for the copies of its stage."""
    starts = (chain_starts[chain], *chain_starts[:chain], *chain_starts[chain + 1 :])
    stages = tuple(start + stage for stage in one.stages for start in starts)
    return Reduction(one.kernels, stages)


def number_microbatches(graph: OpGraph, chain_starts: tuple[int, ...]) -> OpGraph:
    """The graph with distinct numbers for the microbatches of different chains."""
    chain = np.searchsorted(np.array(chain_starts), graph.stage, side="right") - 1
    each = graph.microbatch.max(initial=0) + 1
    return dataclasses.replace(graph, microbatch=graph.microbatch + chain * each)
