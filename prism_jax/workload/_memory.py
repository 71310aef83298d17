"""The memory of each stage on one GPU: parameters, and activations of a microbatch."""

import functools as ft
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..data import Cluster, Kernels, Layout, Model, ScheduleConfig, Training
from ._architecture import Part, Parts, recomputed, total_parameters
from ._costs import Costs
from ._sharded import (
    GRADIENT_BYTES,
    beside_layers,
    deals_each_microbatch,
    instance,
    shards,
    unit_parameters,
)
from ._split import Held, Stages, check_split, deal, held_of
from .modules import EmbeddingBags


Sizes = dict[str, float]  # In bytes, by part.


def add_sizes(total: Sizes, more: Mapping[str, float], times: float = 1) -> Sizes:
    """Adds `times` the sizes of `more` to a total, in place, and returns it."""
    for name, size in more.items():
        total[name] = total.get(name, 0.0) + times * size
    return total


class StageMemory(NamedTuple):
    """The memory of one stage on one GPU, in bytes by part; parameters are counted.

    **Attributes:**

    - `dense`, `experts`: how many parameters it holds.
    - `kept`: the activations of each microbatch that are kept from its forward to its backward.
    - `forward`: the additional memory at the end of its forward.
    - `backward`: the additional memory of its backward, besides the activations of all
        microbatches.
    - `summed`: its gradients, if they are unsharded only while they are accumulated and
        reduce-scattered.
    - `tables`: how many values of embedding tables it holds.
    - `frozen`: how many parameters it holds that are not trained.
    """

    dense: float
    experts: float
    kept: Mapping[str, float]
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    summed: float = 0.0
    tables: float = 0.0
    frozen: float = 0.0


def memory_of_stages(
    model: Model,
    layout: Layout,
    schedule: ScheduleConfig,
    training: Training,
    cluster: Cluster,
    kernels: Kernels,
    stage_to_rank: Sequence[int],
) -> tuple[StageMemory, ...]:
    """The memory of each global virtual stage; the arguments are those of `lower`.

    **Raises:**

    A `ValueError` if the layout does not fit the model.
    """
    check_split(model, layout, schedule, training)
    costs = Costs(model, layout, training, cluster, kernels)
    stages = deal(model, layout, schedule, stage_to_rank)
    equal = ft.cache(lambda parts, first: _stage_memory(costs, stages, first))
    found: dict[tuple, int] = {}
    return tuple(
        equal(parts, found.setdefault((parts, stage == len(stages.parts) - 1), stage))
        for stage, parts in enumerate(stages.parts)
    )


def _stage_memory(costs: Costs, stages: Stages, stage: int) -> StageMemory:
    """The memory of a stage."""
    layout, training = costs.layout, costs.training
    held = held_of(stages.parameters[stage], layout)
    kept: Sizes = {}
    again: Sizes = {}
    logits = gradients = 0.0
    each = training.recompute_layers if training.recompute_method == "uniform" else 1
    for one in recomputed(stages.parts[stage], training):
        own = one.part.costs(costs)
        parts = _kept(own, one.part)
        gradients = max(gradients, *_of_modules(own, one.part))
        logits += parts.get("logits", 0.0) * one.count
        if not one.again:
            add_sizes(kept, parts, one.count)
            continue
        # Of `each` layers only the input is kept; these are computed again all at once.
        states = costs.activation_bytes * own.norm_tokens * own.model.hidden_size
        add_sizes(kept, {"checkpoints": float(states)}, -(-one.count // each))
        whole = add_sizes({}, parts, min(each, one.count))
        again = max(again, whole, key=lambda sizes: sum(sizes.values()))
    # Besides the float32 logits, which are kept, there are those in 16 bits, as are their
    # gradients; all of these are gone when the gradients of the layers are computed.
    besides = logits * costs.activation_bytes / 4
    beyond = max(gradients + sum(again.values()) - logits - besides, 0.0)
    whole, dealt = _units(costs, stages, stage)
    if training.forward_only:
        return StageMemory(
            dense=held.dense,
            experts=held.experts,
            kept={},
            forward={**_largest(costs, stages.parts[stage]), "gathered": whole},
            backward={},
            tables=_tables(costs, stages, stage),
            frozen=_frozen(costs, stages.parts[stage]),
        )
    backward = {"workspace": beyond} if beyond else {"logits": besides}
    return StageMemory(
        dense=held.dense,
        experts=held.experts,
        kept=kept,
        forward={"logits": besides, "gathered": whole},
        backward={**backward, "gathered": whole + dealt},
        summed=_summed(costs, held),
        tables=_tables(costs, stages, stage),
        frozen=_frozen(costs, stages.parts[stage]),
    )


def _largest(costs: Costs, parts: Parts) -> Sizes:
    """What a forward holds until the next layer where nothing is kept for a backward: what a layer,
    or an end of the model, would keep, of that which would keep most.
    """
    each = (_kept(one.costs(costs), one) for one, _ in parts)
    return max(each, key=lambda sizes: sum(sizes.values()), default={})


def _tables(costs: Costs, stages: Stages, stage: int) -> float:
    """The values of embedding tables on the GPU with the most of them."""
    modules = (module for part, _ in stages.parts[stage] for module in part.modules)
    shares = [one.fullest(costs.layout.ep) for one in modules if isinstance(one, EmbeddingBags)]
    return stages.parameters[stage].tables * sum(shares)


def _frozen(costs: Costs, parts: Parts) -> float:
    """The parameters of a stage that are not trained, of which each replica has all."""
    alike = tuple((part._replace(frozen=False), n) for part, n in parts if part.frozen)
    return sum(held_of(total_parameters(costs.model, alike), costs.layout))


def _summed(costs: Costs, held: Held) -> float:
    """The gradients of a stage that are unsharded until they are reduce-scattered."""
    training = costs.training
    if not shards(training)[0] or deals_each_microbatch(training):
        return 0.0
    groups = zip(held, (costs.dp, costs.edp), strict=True)
    shared = sum(number for number, group in groups if instance(group, training)[0].size > 1)
    return GRADIENT_BYTES[training.gradient_dtype] * shared


def _units(costs: Costs, stages: Stages, stage: int) -> tuple[float, float]:
    """The bytes of units that are unsharded at a time. Parameters: those of the unit that runs, and
    of those that are gathered ahead. Gradients: those of the unit that runs and, if collectives
    overlap with compute, of the unit that is being reduce-scattered.
    """
    training = costs.training
    whole = dealt = 0.0
    if not beside_layers(training):
        return whole, dealt
    sizes: list[float] = []
    for one, count in stages.parts[stage]:
        sizes += [sum(n for n, _ in unit_parameters(costs, one))] * count
    sizes.sort(reverse=True)
    if shards(training)[1] and training.reshard_after_forward:
        whole = 2 * sum(sizes[: 1 + training.prefetch])
    if deals_each_microbatch(training):
        dealt = GRADIENT_BYTES[training.gradient_dtype] * sum(sizes[: 1 + (training.prefetch > 0)])
    return whole, dealt


def _kept(costs: Costs, part: Part) -> Sizes:
    """The activations of one microbatch that a layer, or an end of the model, keeps."""
    parts: Sizes = {}
    states = costs.norm_tokens * costs.model.hidden_size
    for module in part.modules:
        add_sizes(parts, module.activations(costs))
        if module.in_residual:
            # The input of a norm and, unless it runs again, its output.
            tensors = 1 if costs.recomputes("layernorm") else 2
            masks = states if costs.model.dropout else 0
            add_sizes(parts, {"norm": tensors * costs.activation_bytes * states, "dropout": masks})
    return parts


def _of_modules(costs: Costs, part: Part) -> list[float]:
    """The memory that the backward of each module of a layer needs: gradients about as large as the
    activations that it keeps, and its buffers.
    """
    modules = part.modules if part.is_layer else ()
    kept = (sum(one.activations(costs).values()) + one.buffers(costs) for one in modules)
    return [0.0, *kept]
