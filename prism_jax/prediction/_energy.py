"""What a step of a job draws, and what its power limit costs."""

import msgspec

from ..cluster import drawn
from ..data import Job, Power
from ._predict import Prediction, predict


# The share of a limit that a derivative's difference is over.
_STEP = 1e-4


class Energy(msgspec.Struct, frozen=True):
    """What a step without variability draws, on a device of which that is known.

    **Attributes:**

    - `limit_w`: the limit of each GPU, in watts.
    - `joules`: the energy of all GPUs in a step, without hosts, network and cooling, in joules.
    - `tokens_per_joule`: the tokens of a step over this energy.
    - `seconds_per_w`: the derivative of the step time by the limit, in seconds per watt; negative
        where a higher limit makes the step shorter.
    """

    limit_w: float
    joules: float
    tokens_per_joule: float
    seconds_per_w: float

    def line(self) -> str:
        """A line of text for users."""
        each = 1e3 * abs(self.seconds_per_w)
        return (
            f"power:   {self.limit_w:g} W a GPU at most, {self.joules / 1e3:,.4g} kJ a step, "
            f"{self.tokens_per_joule:.3g} tokens/J; a watt more saves {each:.3g} ms a step"
        )


def energy(job: Job, found: Prediction | None = None) -> Energy | None:
    """The energy of a job's step, and how its power limit changes it.

    A GPU draws what its kernels draw while they run, and its static power while it waits or
    communicates, so that the energy is a lower bound.

    **Arguments:**

    - `job`: a job with a model and a cluster.
    - `found`: its prediction, where it is known already.

    **Returns:**

    An `Energy`; `None` if it is not known what the job's device draws.

    **Raises:**

    `ValueError` wherever [`predict`][] raises it.
    """
    power = None if job.cluster is None else job.cluster.device.power
    if power is None:
        return None
    found = predict(job) if found is None else found
    joules = job.layout.world_size * sum(
        seconds * drawn(power, "" if _waits(part) else part)
        for part, seconds in found.breakdown.items()
    )
    step = _STEP * (power.limit_w - power.static_w)
    higher, lower = (_at(job, power, power.limit_w + change).mean for change in (step, -step))
    return Energy(
        limit_w=power.limit_w,
        joules=joules,
        tokens_per_joule=found.tokens_per_s * found.mean / joules,
        seconds_per_w=(higher - lower) / (2 * step),
    )


def _waits(part: str) -> bool:
    return part in ("bubble", "host") or part.startswith("exposed ")


def _at(job: Job, power: Power, limit_w: float) -> Prediction:
    """The prediction at another limit."""
    cluster = job.cluster
    assert cluster is not None
    power = msgspec.structs.replace(power, limit_w=limit_w)
    device = msgspec.structs.replace(cluster.device, power=power)
    cluster = msgspec.structs.replace(cluster, device=device)
    return predict(msgspec.structs.replace(job, cluster=cluster))
