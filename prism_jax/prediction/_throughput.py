"""What a step yields and what it draws: throughput, the parts of its mean, and energy."""

import math

import msgspec

from .._summary import GIB, Shown
from ..cluster import drawn
from ..data import Job
from ._memory import memory
from ._predict import Prediction, mean_step, predict, rate_form, with_values


# A higher MFU than that of any training step.
_MOST_MFU = 0.8
_FAST = (
    f"note: an MFU above {100 * _MOST_MFU:.0f} % is more than any training step has reached; check "
    "the job's `dtype`, its device's `peak_flop_per_s` and its tables of kernels."
)
# The least share of a mean that is printed.
_LEAST = 5e-4
# The share of a limit that a derivative's difference is over.
_STEP = 1e-4


class Throughput(Shown, msgspec.Struct, frozen=True):
    """The throughput of a job at a mean step time.

    **Attributes:**

    - `world_size`: the number of its GPUs.
    - `tokens_per_s_per_gpu`, `samples_per_s_per_gpu`, `flop_per_s_per_gpu`: tokens (`nan` for a
        model without words), sequences or other samples, and FLOPs of the model without
        recomputation, per second and GPU.
    - `mfu`: these FLOPs as a share of the devices' peak; `None` if the peak is not known.
    - `memory_bytes`: the memory of the fullest GPU.
    - `breakdown`: seconds that add up to the mean: `compute`; `bubble`, waiting for other stages;
        `exposed tp` and so on, exposed communication by degree of parallelism; and `variability`,
        the time that variability adds, if there is any.
    """

    world_size: int
    tokens_per_s_per_gpu: float
    samples_per_s_per_gpu: float
    flop_per_s_per_gpu: float
    mfu: float | None
    memory_bytes: float
    breakdown: dict[str, float]

    def rate(self, gpus: int = 1) -> str:
        """What so many of its GPUs do in a second: tokens, or samples of a model without words."""
        per_gpu, unit = _counted(self.tokens_per_s_per_gpu, self.samples_per_s_per_gpu)
        return f"{gpus * per_gpu:{rate_form(gpus * per_gpu)}} {unit}/s"

    def headline(self) -> str:
        mfu = "" if self.mfu is None else f" ({100 * self.mfu:.1f} % MFU)"
        parts = ", ".join(
            f"{name} {100 * seconds / sum(self.breakdown.values()):.1f} %"
            for name, seconds in self.breakdown.items()
            if abs(seconds) >= _LEAST * sum(self.breakdown.values())
        )
        lines = [
            f"per GPU: {self.rate()}, "
            f"{self.flop_per_s_per_gpu / 1e12:,.0f} model TFLOP/s{mfu}, "
            f"{self.memory_bytes / GIB:.1f} GiB on the fullest",
            f"mean:    {parts}",
            *[_FAST] * (self.mfu is not None and self.mfu > _MOST_MFU),
        ]
        return "\n".join(lines)


def throughput(
    job: Job | None, mean: float | None = None, prediction: Prediction | None = None
) -> Throughput | None:
    """The throughput of a job at a mean step time in seconds, by default that without variability;
    `None` for a profile, of which only latencies are known. `prediction` is that of the job, where
    it is known already.
    """
    if job is None or job.model is None or job.cluster is None or job.training is None:
        return None
    prediction = predict(job) if prediction is None else prediction
    mean = prediction.mean if mean is None else mean
    slower, number = mean / prediction.mean, job.layout.world_size
    exposed = {k: s for k, s in prediction.breakdown.items() if k.startswith("exposed ")}
    bubble = prediction.breakdown.get("bubble", 0.0)
    parts = {"compute": prediction.mean - bubble - sum(exposed.values()), "bubble": bubble}
    parts |= dict(sorted(exposed.items())) | {"variability": mean - prediction.mean}
    return Throughput(
        world_size=number,
        tokens_per_s_per_gpu=prediction.tokens_per_s / number / slower,
        samples_per_s_per_gpu=prediction.samples_per_s / number / slower,
        flop_per_s_per_gpu=prediction.flop_per_s / slower,
        mfu=prediction.mfu / slower if prediction.mfu == prediction.mfu else None,
        memory_bytes=memory(job).fullest.bytes,
        breakdown={k: s for k, s in parts.items() if abs(s) > 1e-12 * mean},
    )


def _counted(tokens: float, samples: float) -> tuple[float, str]:
    """Tokens or, of a model without words, samples; and which."""
    return (samples, "samples") if math.isnan(tokens) else (tokens, "tokens")


class Energy(Shown, msgspec.Struct, frozen=True):
    """What a step without variability draws, on a device of which that is known.

    **Attributes:**

    - `limit_w`: the limit of each GPU, in watts.
    - `joules`: the energy of all GPUs in a step, without hosts, network and cooling, in joules.
    - `tokens_per_joule`, `samples_per_joule`: the tokens (`nan` for a model without words) and the
        samples of a step over this energy.
    - `seconds_per_w`: the derivative of the step time by the limit, in seconds per watt; negative
        where a higher limit makes the step shorter.
    """

    limit_w: float
    joules: float
    tokens_per_joule: float
    samples_per_joule: float
    seconds_per_w: float

    def headline(self) -> str:
        per_joule, unit = _counted(self.tokens_per_joule, self.samples_per_joule)
        return (
            f"power:   {self.limit_w:g} W a GPU at most, {self.joules / 1e3:,.4g} kJ a step, "
            f"{per_joule:.3g} {unit}/J; a watt more saves {1e3 * abs(self.seconds_per_w):.3g} ms a "
            "step"
        )


def energy(job: Job, prediction: Prediction | None = None) -> Energy | None:
    """The energy of a job's step, and how its power limit changes it.

    A GPU draws what its kernels draw while they run, and its static power while it waits or
    communicates, so that the energy is a lower bound.

    **Arguments:**

    - `job`: a job with a model and a cluster.
    - `prediction`: its prediction, where it is known already.

    **Returns:**

    An `Energy`; `None` if it is not known what the job's device draws.

    **Raises:**

    `ValueError` wherever [`predict`][] raises it.
    """
    power = None if job.cluster is None else job.cluster.device.power
    if power is None:
        return None
    prediction = predict(job) if prediction is None else prediction

    def watts(part: str) -> float:
        waits = part in ("bubble", "host") or part.startswith("exposed ")
        return drawn(power, "" if waits else part)

    parts = prediction.breakdown.items()
    joules = job.layout.world_size * sum(seconds * watts(part) for part, seconds in parts)
    step = _STEP * (power.limit_w - power.static_w)
    higher, lower = (
        mean_step(with_values(job, {"cluster.device.power.limit_w": power.limit_w + change}))
        for change in (step, -step)
    )
    return Energy(
        limit_w=power.limit_w,
        joules=joules,
        tokens_per_joule=prediction.tokens_per_s * prediction.mean / joules,
        samples_per_joule=prediction.samples_per_s * prediction.mean / joules,
        seconds_per_w=(higher - lower) / (2 * step),
    )
