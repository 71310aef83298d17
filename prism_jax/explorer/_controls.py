"""What one can move of a job: degrees of its layout, its work, its machine, its software, and
factors on spreads.
"""

from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

import msgspec

from ..analysis import slider_parameters
from ..data import Job, Training, list_names
from ..lowering import job_parts
from ..program import Program
from ..schedule import schedules
from ..workload import has_experts


_POWERS = tuple(2**k for k in range(9))
_VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8, 12)
_FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
# The group of factors on laws; names of all others are keys of a job.
FACTORS = "factors on the law"
# A job without a software stack, which has none until one is chosen.
NO_STACK = "none"


class Control(msgspec.Struct, frozen=True):
    """**Attributes:**

    - `group`: where it stands on the page: `layout`, `work`, `machine`, `software` or
        `factors on the law`.
    - `name`: a key of the job, or what a factor is on, as `prism_jax.analysis.sliders` calls it.
    - `values`, `own`: what it can be set to, and what the job has.
    """

    group: str
    name: str
    values: tuple[str, ...]
    own: str


def controls_of(job: Job, program: Program) -> tuple[Control, ...]:
    """The controls of a job with a model. Not all their values go together."""
    parts = job_parts(job)
    layout, schedule, training = job.layout, job.schedule, parts.training
    stack = training.software or NO_STACK
    degrees = {"tp": parts.cluster.links[0].group, "pp": 64, "cp": 16}
    degrees |= {"ep": 256} if has_experts(parts.model) else {}
    rows: list[tuple[str, str, Any, Iterable[Any]]] = []
    for name, largest in degrees.items():
        most = min(largest, layout.world_size)
        powers = (n for n in _POWERS if n <= most)
        rows.append(("layout", f"layout.{name}", getattr(layout, name), powers))
    rows += [
        ("layout", "training.zero", training.zero, range(4)),
        ("work", "world_size", layout.world_size, _around(layout.world_size)),
        ("work", "training.global_batch_size", job.batch_size, _around(job.batch_size)),
        ("work", "training.microbatch_size", training.microbatch_size, _POWERS[:4]),
        ("work", "training.recompute", training.recompute, _allowed("recompute")),
        ("work", "schedule.kind", schedule.kind, sorted(schedules())),
        ("work", "schedule.virtual_stages", schedule.virtual_stages, _VIRTUAL_STAGES),
        ("machine", "cluster", parts.cluster.name, list_names("cluster")),
        ("machine", "training.dtype", training.dtype, parts.cluster.device.peak_flop_per_s),
        ("software", "training.software", stack, list_names("software stack")),
        ("software", "training.attention", training.attention, _allowed("attention")),
    ]
    for name, (own, (lowest, *_, highest), _) in slider_parameters(program).items():
        if name.startswith("mean of"):
            continue  # A step without variability would follow it, too.
        factors = [factor for factor in _FACTORS if lowest <= factor * own <= highest]
        rows += [(FACTORS, name, 1.0, factors)] * bool(own)
    return tuple(_control(*row) for row in rows)


def _control(group: str, name: str, own: Any, values: Iterable[Any]) -> Control:
    """Numbers rise; the job's own value is one of them, and a word that is not listed the first."""
    listed = list(values)
    listed = listed if own in listed else [own, *listed]
    if not isinstance(own, str):
        listed = sorted({*listed})
    return Control(group, name, tuple(map(_text, listed)), _text(own))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _around(number: int) -> Iterable[int]:
    """A quarter to four times a number, as far as these are whole."""
    return [
        number * up // down
        for up, down in ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
        if number * up % down == 0
    ]


def _allowed(key: str) -> tuple[str, ...]:
    """What a key of `training` can be."""
    return get_args(get_type_hints(Training)[key])
