import dataclasses

from .._misc import unknown_name
from ._base import AbstractSchedule
from ._gpipe import GPipe
from ._interleaved import InterleavedOneFOneB
from ._looped_bfs import LoopedBFS
from ._one_f_one_b import OneFOneB


# The names that job files use. A new schedule is a file, and a line here and in `__init__.py`.
schedules: dict[str, type[AbstractSchedule]] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "interleaved-1f1b": InterleavedOneFOneB,
    "looped-bfs": LoopedBFS,
}


def make_schedule(
    kind: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    microbatch_group_size: int | None = None,
) -> AbstractSchedule:
    """Makes a schedule by the name that job files use.

    **Arguments:**

    - `kind`: `gpipe`, `1f1b`, `interleaved-1f1b` or `looped-bfs`.
    - `num_ranks`: the number of pipeline ranks.
    - `num_microbatches`: the number of microbatches in a step.
    - `virtual_stages`: the number of stages on each rank.
    - `microbatch_group_size`: as in [`prism_jax.InterleavedOneFOneB`][].

    **Returns:**

    A schedule.
    """
    if kind not in schedules:
        raise ValueError(unknown_name("schedule", kind, schedules))
    given = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "virtual_stages": virtual_stages,
        "microbatch_group_size": microbatch_group_size,
    }
    defaults = {"virtual_stages": 1, "microbatch_group_size": None}
    for name, default in defaults.items():
        if given[name] != default and name not in _options(kind):
            others = " or ".join(f"`{other}`" for other in schedules if name in _options(other))
            raise ValueError(
                f"The schedule `{kind}` has no `{name}`, but `{name}={given[name]!r}` is given; "
                f"leave it out, or use {others}."
            )
    return schedules[kind](**{name: given[name] for name in given if name in _options(kind)})


def _options(kind: str) -> set[str]:
    return {field.name for field in dataclasses.fields(schedules[kind])}  # pyright: ignore
