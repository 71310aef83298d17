"""From a job to the kernels of its step."""

from ..data import Cluster, Job, Kernels, Layout, Model, ScheduleConfig, Training
from ._block import Block, Workload
from ._costs import Costs
from ._ends import backward_embedding, backward_head, forward_embedding, forward_head
from ._layer import backward_layer, forward_layer
from ._parts import block
from ._replicas import reduce_scatters, tail
from ._split import check_split, layers_of_stages, pairs_of_ranks


def lower(
    model: Model,
    layout: Layout,
    schedule: ScheduleConfig,
    training: Training,
    cluster: Cluster,
    kernels: Kernels,
) -> Workload:
    """The kernels of one training step, with their mean latencies.

    **Arguments:**

    - `model`, `layout`, `schedule`, `training`: what is trained and how it is laid out.
    - `cluster`: the machine.
    - `kernels`: the profile of its kernels.

    **Returns:**

    The blocks of each stage and phase, and what follows the pipeline.

    **Raises:**

    A `ValueError` where the layout does not fit the model.
    """
    check_split(model, layout, schedule, training)
    costs = Costs(model, layout, training, cluster, kernels)
    layers = layers_of_stages(model, layout, schedule)
    forward_one, backward_one = forward_layer(costs), backward_layer(costs)
    forward: list[Block] = []
    backward: list[Block] = []
    for stage, count in enumerate(layers):
        first, last = stage == 0, stage == len(layers) - 1
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
        send_recv={pair: costs.send_recv(*pair) for pair in pairs_of_ranks(layout, schedule)},
        reduce_scatter=reduce_scatters(costs, schedule, tuple(backward)),
        tail=tail(costs, schedule, tuple(forward)),
        group_size=layout.tp * layout.cp,
    )


def lower_job(job: Job) -> Workload:
    """`lower` for a job.

    **Raises:**

    A `ValueError` where the job has no model, or its layout does not fit it.
    """
    if job.model is None or job.cluster is None or job.training is None or job.kernels is None:
        raise ValueError(
            f"the job `{job.name}` has a layout and a schedule only; to predict its step it needs "
            "`model`, `cluster` and `training`, or a profile of a trace."
        )
    try:
        return lower(job.model, job.layout, job.schedule, job.training, job.cluster, job.kernels)
    except ValueError as error:
        raise ValueError(f"job `{job.name}`: {error}") from None
