"""What a page is made of."""

import dataclasses
from collections.abc import Mapping

from ..analysis import Criticality, SampledStep, Sensitivity
from ..data import Job, Profile
from ..fitting import Epistemic
from ..law import Law
from ..program import Memory, Throughput


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the figures of a report come from.

    **Attributes:**

    - `num_samples`: of the law; `num_steps`: of what takes longer per step.
    - `seed`: what the key is made of, in words.
    - `commands`: for each figure the command that prints it again; empty for a report that Python
        asked for.
    - `version`, `jax`: of the packages.
    - `machine`: what it ran on; no name of a machine.
    - `date`: of the day.
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
    """The results that a page shows; what is `None` is told in `missing`.

    **Attributes:**

    - `of`: the job, or the profile of a measured one.
    - `num_ops`: of a replica.
    - `law`: of the step time, with quantiles by name in `levels`.
    - `epistemic`: the law of a run that has not been, if it was asked for.
    - `throughput`, `memory`: of a job; of a profile only latencies are known.
    - `sensitivity`, `criticality`, `step`: of the law.
    - `missing`: for each figure that is not there, why.
    - `origin`: how all of them were obtained.
    """

    of: Job | Profile
    num_ops: int
    law: Law
    levels: dict[str, float]
    epistemic: Epistemic | None
    throughput: Throughput | None
    memory: Memory | None
    sensitivity: Sensitivity | None
    criticality: Criticality | None
    step: SampledStep | None
    missing: dict[str, str]
    origin: Origin

    @property
    def job(self) -> Job | None:
        """The job; `None` for a profile."""
        return self.of if isinstance(self.of, Job) else None
