"""The throughput of a job at a step time, and the parts of its mean."""

import math
from collections.abc import Mapping

import msgspec

from .._summary import Column, Table
from ..data import Job
from ._memory import memory
from ._predict import Prediction, predict


# A higher MFU than that of any training step.
_MOST_MFU = 0.8
_FAST = (
    f"note: an MFU above {100 * _MOST_MFU:.0f} % is more than any training step has reached; check "
    "the job's `dtype`, its device's `peak_flop_per_s` and its tables of kernels."
)
# The least share of a mean that is printed.
_LEAST = 5e-4


class Throughput(msgspec.Struct, frozen=True):
    """The throughput of a job at a mean step time.

    **Attributes:**

    - `world_size`: the number of its GPUs.
    - `tokens_per_s_per_gpu`, `flop_per_s_per_gpu`: tokens, and FLOPs of the model without
        recomputation, per second and GPU.
    - `mfu`: these FLOPs as a share of the devices' peak; `None` if the peak is not known.
    - `memory_bytes`: the memory of the fullest GPU.
    - `breakdown`: seconds that add up to the mean: `compute`; `bubble`, waiting for other stages;
        `exposed tp` and so on, exposed communication by degree of parallelism; and `variability`,
        the time that variability adds, if there is any.
    """

    world_size: int
    tokens_per_s_per_gpu: float
    flop_per_s_per_gpu: float
    mfu: float | None
    memory_bytes: float
    breakdown: dict[str, float]

    def lines(self) -> list[str]:
        """Two lines of text for users."""
        mfu = "" if self.mfu is None else f" ({100 * self.mfu:.1f} % MFU)"
        parts = ", ".join(
            f"{name} {100 * seconds / sum(self.breakdown.values()):.1f} %"
            for name, seconds in self.breakdown.items()
            if abs(seconds) >= _LEAST * sum(self.breakdown.values())
        )
        return [
            f"per GPU: {self.tokens_per_s_per_gpu:,.0f} tokens/s, "
            f"{self.flop_per_s_per_gpu / 1e12:,.0f} model TFLOP/s{mfu}, "
            f"{self.memory_bytes / 1e9:.1f} GB on the fullest",
            f"mean:    {parts}",
            *[_FAST] * (self.mfu is not None and self.mfu > _MOST_MFU),
        ]


def parts_table(parts: Mapping[str, float], title: str = "") -> Table:
    """The seconds of the parts of a step, and their shares."""
    total = sum(parts.values()) or math.nan
    rows = [{"part": name, "seconds": seconds} for name, seconds in parts.items()]
    columns = (
        Column("part"),
        Column("time", "seconds", ".4g", "s"),
        Column("share", "seconds", ".1f", "%", scale=100 / total),
    )
    return Table(columns, rows, title, most=None)


def throughput(job: Job | None, mean: float | None = None) -> Throughput | None:
    """The throughput of a job at a mean step time in seconds, by default that without variability;
    `None` for a profile, of which only latencies are known.
    """
    if job is None or job.model is None or job.cluster is None or job.training is None:
        return None
    found = predict(job)
    mean = found.mean if mean is None else mean
    slower, number = mean / found.mean, job.layout.world_size
    return Throughput(
        world_size=number,
        tokens_per_s_per_gpu=found.tokens_per_s / number / slower,
        flop_per_s_per_gpu=found.flop_per_s / slower,
        mfu=found.mfu / slower if found.mfu == found.mfu else None,
        memory_bytes=memory(job).fullest.bytes,
        breakdown=_breakdown(found, mean),
    )


def _breakdown(found: Prediction, mean: float) -> dict[str, float]:
    exposed = {k: s for k, s in found.breakdown.items() if k.startswith("exposed ")}
    bubble = found.breakdown.get("bubble", 0.0)
    parts = {"compute": found.mean - bubble - sum(exposed.values()), "bubble": bubble}
    parts |= {name: exposed[name] for name in sorted(exposed)}
    parts["variability"] = mean - found.mean
    return {name: seconds for name, seconds in parts.items() if abs(seconds) > 1e-12 * mean}
