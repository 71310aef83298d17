"""From a job to the kernels of its step."""

from collections.abc import Sequence

from ..data import Cluster, Kernels, Layout, Model, ScheduleConfig, Training
from ._block import Block, Workload
from ._costs import Costs
from ._ends import backward_embedding, backward_head, forward_embedding, forward_head
from ._layer import backward_layer, forward_layer
from ._parts import block
from ._replicas import reduce_scatters, tail
from ._split import check_split, deal, pairs_of_ranks


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
    costs = Costs(model, layout, training, cluster, kernels)
    stages = deal(model, layout, schedule, stage_to_rank)
    forward_one, backward_one = forward_layer(costs), backward_layer(costs)
    forward: list[Block] = []
    backward: list[Block] = []
    for stage, count in enumerate(stages.layers):
        first, last = stage == 0, stage == len(stages.layers) - 1
        forward.append(
            block(
                [
                    (forward_embedding(costs) if first else [], 1),
                    (forward_one, count),
                    (forward_head(costs) if last else [], 1),
                ]
            )
        )
        backward.append(
            block(
                [
                    (backward_head(costs) if last else [], 1),
                    (backward_one, count),
                    (backward_embedding(costs) if first else [], 1),
                ]
            )
        )
    return Workload(
        forward=tuple(forward),
        backward=tuple(backward),
        send_recv={pair: costs.send_recv(*pair) for pair in pairs_of_ranks(stages)},
        reduce_scatter=reduce_scatters(costs, stages, tuple(backward)),
        tail=tail(costs, stages, tuple(forward)),
        group_size=layout.tp * layout.cp,
    )
