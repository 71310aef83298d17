"""The schedule that a job file describes."""

from ..data import Layout, ScheduleConfig, Training
from ._base import AbstractSchedule
from ._csv import places
from ._custom import CustomSchedule
from ._derived import ForwardOnly
from ._registry import make_schedule


TRACED = "traced"  # The kind of schedule whose order is taken from a trace.


def order_of(
    config: ScheduleConfig, layout: Layout, training: Training | None = None
) -> AbstractSchedule:
    """The schedule that a job file describes; only its forwards if `training` has nothing else.

    **Raises:**

    `ValueError` if there is no such schedule, or if the orders of a traced schedule are missing or
    fit neither each other nor the layout.
    """
    order = _of_config(config, layout)
    return ForwardOnly(order) if training is not None and training.forward_only else order


def _of_config(config: ScheduleConfig, layout: Layout) -> AbstractSchedule:
    if config.kind == TRACED:
        return _traced(config, layout)
    if config.orders is not None:
        raise ValueError(
            f"`schedule.orders` is given, but `schedule.kind` is `{config.kind}`; leave one out, "
            f"or make the kind `{TRACED}`."
        )
    return make_schedule(
        config.kind,
        num_ranks=layout.pp,
        num_microbatches=config.num_microbatches,
        virtual_stages=config.virtual_stages,
        microbatch_group_size=config.microbatch_group_size,
        memory_limit=config.memory_limit,
    )


def _traced(config: ScheduleConfig, layout: Layout) -> CustomSchedule:
    if config.orders is None:
        raise ValueError(
            f"The schedule `{TRACED}` has no `orders`: it is read off a trace; give the trace to "
            "`prism-jax fit`, or the schedule's name."
        )
    orders = [order.split() for order in config.orders]
    schedule = CustomSchedule(orders, places(orders))
    given = (len(orders), schedule.num_stages, schedule.num_microbatches)
    stages = layout.pp * config.virtual_stages
    if given != (layout.pp, stages, config.num_microbatches):
        raise ValueError(
            f"`schedule.orders` has {given[0]} ranks, {given[1]} stages and {given[2]} "
            f"microbatches, but the job has {layout.pp}, pp * virtual_stages = {stages} and "
            f"{config.num_microbatches}; make them the same."
        )
    return schedule
