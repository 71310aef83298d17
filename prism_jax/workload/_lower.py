"""Lowers a job to the kernels of its step."""

import functools as ft
import math
from collections.abc import Collection, Sequence

import msgspec

from ._architecture import LayerPart, Parts, recomputed
from ._block import Block, Kernel, Workload
from ._costs import Costs
from ._data_parallel import received, reductions_of_ranks, tail
from ._memory import offloaded_bytes
from ._parts import block_means
from ._passes import passes_of
from ._split import Stages, check_split, deal, pairs_of_ranks
from ._units import host_waits, launched_units, overlaps_layers, row_of_units, unit_of


def lower(
    job: Costs,
    stage_to_rank: Sequence[int],
    phases: Collection[str] = ("F", "B", "I", "W", "FB"),
) -> Workload:
    """The kernels of one training step, with their mean latencies.

    **Arguments:**

    - `job`: the model, how it is trained, and the machine.
    - `stage_to_rank`: the pipeline rank of each global virtual stage.
    - `phases`: the phases of the schedule's ops. What only others need is left out: the halves of a
        backward (`I`, `W`), and overlapped pairs (`FB`).

    **Returns:**

    The blocks of each stage and phase, and those that run after the pipeline.

    **Raises:**

    A `ValueError` if the layout does not fit the model.
    """
    layout, training, kernels = job.layout, job.training, job.kernels
    check_split(job.model, layout, job.schedule, training)
    waited = (layout.dp / kernels.num_replicas) ** kernels.growth
    kernels = msgspec.structs.replace(
        kernels,
        compute=waited * kernels.compute,
        floor_s=0.0 if training.cuda_graphs == "iteration" else training.launch_floor_s,
    )
    costs = msgspec.structs.replace(job, kernels=kernels)
    stages = deal(job, stage_to_rank)
    forward = _with_received(costs, stages, _blocks(costs, stages, "F"), -1)
    backward = tuple(() for _ in forward)
    halves = {"I": (), "W": ()}
    if not training.forward_only:
        backward = _blocks(costs, stages, "B", back=True)
        if not halves.keys().isdisjoint(phases):
            halves = {phase: _blocks(costs, stages, phase, back=True) for phase in halves}
    limited = _limited(costs, stages, forward, backward)
    if not training.forward_only:
        backward = _with_received(costs, stages, backward, 1)
    return Workload(
        forward=forward,
        backward=backward,
        backward_input=_with_received(costs, stages, halves["I"], 1),
        backward_weight=halves["W"],
        send_recv={pair: costs.send_recv(*pair) for pair in pairs_of_ranks(stages)},
        reductions=reductions_of_ranks(costs, stages),
        contention=kernels.overlap.contention,
        tail=tail(limited, stages, forward),
        members=layout.tp * layout.cp,
        group_size=_group_size(costs),
        passes=passes_of(costs, stages) if "FB" in phases else None,
    )


def _blocks(costs: Costs, stages: Stages, phase: str, *, back: bool = False) -> tuple[Block, ...]:
    """The block of each stage in one phase, whose units run in order or `back` through it."""
    unit = ft.cache(ft.partial(unit_of, costs, phase))

    @ft.cache
    def block_of(parts: Parts) -> Block:
        copies = () if phase == "W" else _copies(costs, parts)
        runs = [
            (unit(part, again)._replace(copies=copies * _is_trained(part)), count)
            for part, count, again in recomputed(parts, costs.training, back=back)
        ]
        then = None
        if phase == "F" and not costs.training.forward_only:
            for part, _, again in recomputed(parts, costs.training)[-1:]:
                then = unit_of(costs, "B", part, again).segments
        whole = row_of_units(costs, runs[::-1] if back else runs, then=then)
        if phase == "W":
            return whole
        passes = [
            (launched_units(costs, parts, back=backward), backward) for backward in (False, True)
        ]
        return whole + host_waits(costs, passes[: 1 + back])[-1]

    return tuple(map(block_of, stages.parts))


def _copies(costs: Costs, parts: Parts) -> tuple[Kernel, ...]:
    """The copies of activations to the host, or back, beside each layer of a stage. Those of some
    layers are spread over all (Transformer Engine, transformer_engine/pytorch/cpu_offload.py).
    """
    layers = sum(count for part, count in parts if _is_trained(part))
    num_bytes = offloaded_bytes(costs, parts)
    return (costs.to_host(num_bytes / layers),) if num_bytes else ()


def _is_trained(part: LayerPart) -> bool:
    return part.is_layer and not part.frozen


def _with_received(
    costs: Costs, stages: Stages, blocks: Sequence[Block], step: int
) -> tuple[Block, ...]:
    """The blocks of all stages, each after `received`. Equal stages still share a block."""
    joined: dict[tuple[Block, int], Block] = {}

    def of_stage(stage: int, block: Block) -> Block:
        first = received(costs, stages, stage, step)
        return joined.setdefault((first, id(block)), first + block) if first else block

    return tuple(of_stage(stage, block) for stage, block in enumerate(blocks))


def _limited(
    costs: Costs, stages: Stages, forward: Sequence[Block], backward: Sequence[Block]
) -> Costs:
    """The costs with the constant of a step limited by `Kernels.constant_share`."""
    kernels = costs.kernels
    if kernels.constant_share is None:
        return costs
    means = [sum(pair) for pair in zip(block_means(forward), block_means(backward), strict=True)]
    ranks = (sum(means[stage] for stage in stages.of_rank(r)) for r in range(costs.layout.pp))
    most = kernels.constant_share * costs.schedule.num_microbatches * max(ranks)
    kernels = msgspec.structs.replace(kernels, constant_s=min(kernels.constant_s, most))
    return msgspec.structs.replace(costs, kernels=kernels)


def _group_size(costs: Costs) -> int:
    """The number of ranks of a stage that meet in every microbatch."""
    layout = costs.layout
    if overlaps_layers(costs.training):
        return layout.tp * layout.cp * layout.dp
    return math.lcm(layout.tp * layout.cp, costs.expert_ranks or 1)
