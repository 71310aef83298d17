"""From a job to the kernels of its step."""

from collections.abc import Sequence

import msgspec

from ..data import Cluster, Kernels, Layout, Model, ScheduleConfig, Training
from ._block import Block, Segment, Workload
from ._costs import Costs
from ._ends import (
    backward_embedding,
    backward_head,
    backward_weight_head,
    forward_embedding,
    forward_head,
)
from ._layer import backward_layer, backward_weight_layer, forward_layer
from ._parts import block
from ._replicas import reduce_scatters, tail
from ._split import check_split, deal, pairs_of_ranks


Part = list[Segment]


def lower(
    model: Model,
    layout: Layout,
    schedule: ScheduleConfig,
    training: Training,
    cluster: Cluster,
    kernels: Kernels,
    stage_to_rank: Sequence[int],
) -> Workload:
    """The kernels of one training step, with their mean latencies.

    **Arguments:**

    - `model`, `layout`, `schedule`, `training`: what is trained and how it is laid out.
    - `cluster`: the machine.
    - `kernels`: the profile of its kernels.
    - `stage_to_rank`: the pipeline rank of each global virtual stage.

    **Returns:**

    The blocks of each stage and phase, and what follows the pipeline.

    **Raises:**

    A `ValueError` where the layout does not fit the model.
    """
    check_split(model, layout, schedule, training)
    waited = (layout.dp / kernels.num_replicas) ** kernels.growth
    kernels = msgspec.structs.replace(kernels, compute=waited * kernels.compute)
    costs = Costs(model, layout, training, cluster, kernels)
    stages = deal(model, layout, schedule, stage_to_rank)
    last = len(stages.layers) - 1

    def blocks(*parts: Part) -> tuple[Block, ...]:
        """What stages run: of the first stage alone, of each layer, and of the last stage alone."""
        times = [(int(stage == 0), n, int(stage == last)) for stage, n in enumerate(stages.layers)]
        return tuple(block(zip(parts, counts, strict=True)) for counts in times)

    forward = blocks(forward_embedding(costs), forward_layer(costs), forward_head(costs))
    embedding = backward_embedding(costs)
    backward = blocks(embedding, backward_layer(costs), backward_head(costs))
    inputs = backward_layer(costs, weights=False), backward_head(costs, weights=False)
    weights = backward_weight_layer(costs), backward_weight_head(costs)
    return Workload(
        forward=forward,
        backward=backward,
        backward_input=blocks([], *inputs),
        # Nothing comes before the embedding, so that its gradients are those of weights.
        backward_weight=blocks(embedding, *weights),
        send_recv={pair: costs.send_recv(*pair) for pair in pairs_of_ranks(stages)},
        reduce_scatter=reduce_scatters(costs, stages, backward),
        tail=tail(costs, stages, forward),
        group_size=layout.tp * layout.cp,
    )
