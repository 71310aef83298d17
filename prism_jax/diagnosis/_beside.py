"""What was measured of each part of a step, beside what is predicted."""

import dataclasses

from .._summary import Column, Table
from ..data import Job
from ..prediction import predict
from ..trace import Contents, median_step_times


_SENDS = ("send", "recv", "send_recv")
_WAITS = "bubble and exposed pp"


@dataclasses.dataclass(frozen=True)
class StepPart:
    """A part of a step as it is predicted and as its kernels ran, in seconds; `None` where there is
    no counterpart.
    """

    part: str
    predicted_s: float | None
    measured_s: float | None


def measured_beside(job: Job, profiled: Contents) -> tuple[StepPart, ...]:
    """The parts of a predicted step beside those of a profile, the largest predicted first.

    Kernels are told by their names. A profile does not tell which degree of parallelism a
    collective is of, so all that are exposed are one part; and so are waits for other stages and
    sends to them. What the host takes is beside the idle time in which launches come late.

    **Arguments:**

    - `job`: from `load_job`, with a model and a cluster.
    - `profiled`: from `contents`.

    **Raises:**

    `ValueError` if the job has no model, or the profile has no step.
    """
    median_step_times(profiled.by_rank or [profiled])  # Or it has no step.
    assert profiled.split is not None
    theirs = {"exposed collectives": 0.0, _WAITS: 0.0}
    for name, seconds in predict(job).breakdown.items():
        is_wait = name in ("bubble", "exposed pp")
        part = _WAITS if is_wait else "exposed collectives" if "exposed" in name else name
        theirs[part] = theirs.get(part, 0.0) + seconds
    idle = {part.cause: part.seconds for part in profiled.idle}
    waits = sum(c.exposed_s for c in profiled.collectives if c.kind in _SENDS)
    ours = dict(profiled.kinds) | {"host": idle.pop("launches", 0.0), _WAITS: waits}
    ours["exposed collectives"] = max(profiled.split.exposed_s - waits, 0.0)
    ours |= {"copies": profiled.phases["copies"]} if profiled.phases else {}
    ours |= {f"idle: {cause}": seconds for cause, seconds in idle.items()}
    names = sorted({**theirs, **ours}, key=lambda name: (-theirs.get(name, 0), -ours.get(name, 0)))
    return tuple(
        StepPart(name, theirs.get(name), ours.get(name))
        for name in names
        if theirs.get(name) or ours.get(name)
    )


def beside_table(job: Job, parts: tuple[StepPart, ...]) -> Table:
    """These parts, as a table."""
    columns = (
        "part",
        Column("predicted", "predicted_s", ".4g", "ms", scale=1e3),
        Column("measured", "measured_s", ".4g", "ms", scale=1e3),
    )
    return Table(columns, parts, f"A step of {job.name} as predicted, beside its kernels")
