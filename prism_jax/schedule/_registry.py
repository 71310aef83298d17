"""Schedules by their names, and the one that a job file describes."""

import dataclasses

from .._installed import Plugins, all_named, named, names_of
from .._misc import subclasses
from ..data import Layout, ScheduleConfig, Training
from ._base import AbstractSchedule
from ._custom import CustomSchedule, ForwardOnly, places


TRACED = "traced"  # The kind of schedule whose order is taken from a trace.
_PLUGINS = Plugins("schedules", "schedule", AbstractSchedule)


def schedules() -> dict[str, type[AbstractSchedule]]:
    """The schedules that job files can name, including those that other packages add."""
    return all_named(_PLUGINS, _imported())


def schedule_class(name: str) -> type[AbstractSchedule]:
    """The schedule of a name as job files have it. Raises as `named`."""
    return named(_PLUGINS, _imported(), name)


def _imported() -> dict[str, type[AbstractSchedule]]:
    return {cls.kind: cls for cls in subclasses(AbstractSchedule) if cls.kind is not None}


def schedule_name(text: str) -> str:
    """The name of a schedule, in any spelling: `1F1B`, `DualPipe` and `zb_h1` are fine.

    **Raises:**

    A `ValueError` if there is no such schedule.
    """
    known = _imported()
    if text in known:
        return text
    alike = (name for name in names_of(_PLUGINS, known) if _letters(name) == _letters(text))
    name = next(alike, text)
    schedule_class(name)  # Raises if there is none.
    return name


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def make_schedule(
    kind: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    microbatch_group_size: int | None = None,
    memory_limit: int | None = None,
) -> AbstractSchedule:
    """Makes a schedule by the name that job files use.

    **Arguments:**

    - `kind`: the name of a schedule in job files, such as `1f1b`.
    - `num_ranks`: the number of pipeline ranks.
    - `num_microbatches`: the number of microbatches in a step.
    - `virtual_stages`: the number of stages on each rank.
    - `microbatch_group_size`: as in [`prism_jax.InterleavedOneFOneB`][].
    - `memory_limit`: as in [`prism_jax.ZBGreedy`][].

    **Returns:**

    A schedule.
    """
    kind = schedule_name(kind)
    schedule = schedule_class(kind)
    options = _options(schedule)
    arguments = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "virtual_stages": virtual_stages,
        "microbatch_group_size": microbatch_group_size,
        "memory_limit": memory_limit,
    }
    defaults = {"virtual_stages": 1, "microbatch_group_size": None, "memory_limit": None}
    for name, default in defaults.items():
        if arguments[name] != default and name not in options:
            having = sorted(kind for kind, cls in _imported().items() if name in _options(cls))
            listed = ", ".join(f"`{kind}`" for kind in having)
            raise ValueError(
                f"The schedule `{kind}` has no `{name}`, but `{name}={arguments[name]!r}` is "
                f"given; leave it out, or use one of {listed}."
            )
    return schedule(**{name: arguments[name] for name in arguments if name in options})


def _options(cls: type[AbstractSchedule]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}  # pyright: ignore


def order_of(
    config: ScheduleConfig, layout: Layout, training: Training | None = None
) -> AbstractSchedule:
    """The schedule that a job file describes; only its forwards if `training` has nothing else.

    **Raises:**

    `ValueError` if there is no such schedule, or if the orders of a traced schedule are missing or
    fit neither each other nor the layout.
    """
    order = (_traced if config.kind == TRACED else _named)(config, layout)
    return ForwardOnly(order) if training is not None and training.forward_only else order


def _named(config: ScheduleConfig, layout: Layout) -> AbstractSchedule:
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
    sizes = (len(orders), schedule.num_stages, schedule.num_microbatches)
    stages = layout.pp * config.virtual_stages
    if sizes != (layout.pp, stages, config.num_microbatches):
        raise ValueError(
            f"`schedule.orders` has {sizes[0]} ranks, {sizes[1]} stages and {sizes[2]} "
            f"microbatches, but the job has {layout.pp}, pp * virtual_stages = {stages} and "
            f"{config.num_microbatches}; make them the same."
        )
    return schedule
