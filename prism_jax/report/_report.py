"""The contents of a page."""

import dataclasses
from collections.abc import Mapping

from ..analysis import Criticality, SampledStep, Sensitivity, Sliders
from ..calibration import Epistemic
from ..data import Job
from ..diagnosis import Diagnosis
from ..law import Law
from ..prediction import Memory, Throughput
from ..profile import Profile


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the figures of a report come from.

    **Attributes:**

    - `num_samples`: the number of steps of the law.
    - `num_steps`: the most steps of sensitivities, criticality and the sampled step.
    - `seed`: how the key was made, in words.
    - `commands`: the command that prints a figure again, for each figure; empty for a report made
        from Python.
    - `version`, `jax`: the versions of the packages.
    - `machine`: the system, the processor and the devices, without the machine's name.
    - `date`: the day of the report.
    """

    num_samples: int
    num_steps: int
    seed: str
    commands: Mapping[str, str]
    version: str
    jax: str
    machine: str
    date: str


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """The results that a page shows. `missing` says why a result is `None`.

    **Attributes:**

    - `of`: the job, or the profile of a measured one.
    - `num_ops`: the number of ops of a replica.
    - `law`: the law of the step time.
    - `levels`: quantiles by name.
    - `epistemic`: the laws of possible runs; `None` without a model.
    - `throughput`, `memory`: those of the job; `None` for a profile, which has only latencies.
    - `sliders`, `sensitivity`, `criticality`, `step`: those of the simulated step time.
    - `quickest`: the cheap setting that shortens a step most, and by which share, if there is any.
    - `diagnosis`: of measured step times, if there are any.
    - `missing`: why a figure is missing, by its name.
    - `origin`: how the figures were obtained.
    """

    of: Job | Profile
    num_ops: int
    law: Law
    levels: dict[str, float]
    epistemic: Epistemic | None
    throughput: Throughput | None
    memory: Memory | None
    quickest: tuple[tuple[str, ...], float] | None
    sliders: Sliders | None
    sensitivity: Sensitivity | None
    criticality: Criticality | None
    step: SampledStep | None
    missing: dict[str, str]
    origin: Origin
    diagnosis: Diagnosis | None = None

    @property
    def job(self) -> Job | None:
        """The job; `None` for a profile."""
        return self.of if isinstance(self.of, Job) else None
