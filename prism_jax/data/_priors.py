"""What is known of a system before its step times are seen: laws of its figures, and by how much
published runs were off, by class of jobs.
"""

import functools as ft
import re
from typing import Annotated, TypeAlias

import msgspec

from ._read import data_folder, read_struct
from ._types import NonNegative, Number, Positive, Text


_Several: TypeAlias = Annotated[int, msgspec.Meta(ge=3)]
# Parts of the names of devices. A device that is named otherwise is of a generation without runs.
_GENERATIONS = {"a[18]00": "A100", "h[128]0": "Hopper", "b[23]00": "Blackwell", "tpu": "TPU"}


class Prior(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A normal law of a figure over systems, and where it is from."""

    mean: Number
    deviation: NonNegative
    source: Text


class Worth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure that counts as much as `observations` observations of it, and where it is from."""

    value: Positive
    observations: NonNegative
    source: Text


class EstimatedNormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A normal law whose mean and standard deviation were estimated from `number` systems."""

    mean: Number
    deviation: Positive
    number: _Several
    source: Text


class Uncalibrated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What kernels have before step times are seen; see `Kernels`, and where it is from."""

    network: Positive
    constant_s: NonNegative
    growth: NonNegative
    source: Text


class SystemSpread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far the spread of a system lies from that which the row `step` of a `variability.csv`
    gives: the standard deviation of the logarithm, over the named systems.
    """

    deviation: Positive
    number: _Several
    systems: tuple[Text, ...]
    source: Text


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure as a line over another: its value at the mean of the other, its slope, and its
    standard deviation around the line.
    """

    mean: Number
    slope: Number
    deviation: NonNegative
    source: Text


class Priors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Laws of figures of any system before it is measured (`kernels/priors.toml`). `calibrate` and
    `simulate --epistemic` use them.

    **Attributes:**

    - `network`: the logarithm of the factor on communication between nodes; see `Calibrated`.
    - `constant_s`: the constant per step.
    - `growth`: the exponent of the number of replicas.
    - `constant_share`: see `Kernels`; of a calibration, that of its shortest step.
    - `uncalibrated`: the level of jobs that are not calibrated.
    - `scale`: the logarithm of a run's median at another scale, relative to the calibrated level.
    - `level`, `level_experts`: the logarithm of the median of one run of a system over that of
        another, for dense models and for models with experts.
    - `sites`: the logarithm of the median of a configuration at one site over that at another of
        the same machine.
    - `drift`, `drift_experts`: the logarithm of the median of the first fifth of a run's steps over
        that of the last fifth. Runs of these systems take some minutes to three hours.
    - `system_spread`: the spread of the slower half of a system's steps.
    - `system_shares`: the logarithm of a system's share of outliers.
    - `system_excess`: the logarithm of the excess of an outlier in spreads, over the
        logarithm of the share of outliers.
    - `spread_elsewhere`: the logarithm of the spread of a run at another scale, relative to that
        at the calibrated scale.
    - `collective_noise`: the logarithm of the noise of collectives between replicas (the standard
        deviation of the logarithm of their latency) in a family of systems.
    - `collective_scale`: the deviation of one system of a family from that logarithm.
    - `step_shared`: the share of the core's variance that a step has in common with the next.
    - `step_alone`: the spread of a step that neither the next step nor collectives explain.
    - `step_spread`: the spread of the core of a run's steps.
    - `outlier_share`: the share of slow outliers among steps.
    - `outlier_excess`: the excess of an outlier over the median, in spreads of the core.
    - `outlier_spread`: the spread of the logarithm of this excess.
    """

    network: Prior
    constant_s: Prior
    constant_share: Worth
    uncalibrated: Uncalibrated
    growth: Prior
    scale: Prior
    level: Prior
    level_experts: Prior
    sites: Prior
    drift: Prior
    drift_experts: Prior
    system_spread: SystemSpread
    system_shares: EstimatedNormal
    system_excess: Line
    spread_elsewhere: Prior
    collective_noise: Prior
    collective_scale: Prior
    step_shared: Worth
    step_alone: Worth
    step_spread: Worth
    outlier_share: Worth
    outlier_excess: Worth
    outlier_spread: Worth


@ft.cache
def load_priors() -> Priors:
    """The priors that are shipped."""
    return read_struct(data_folder("kernels") / "priors.toml", "priors", Priors)


class ErrorClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The law of errors of a class of jobs.

    **Attributes:**

    - `model`: `dense` or `experts`.
    - `fsdp`: whether parameters are sharded (`training.zero` is 3).
    - `generation`, `software`: of the machine, and the stack; empty for all of them.
    - `bias`, `spread`: the median of the logarithm of measured over predicted seconds, and the
        scale of Student's law around it.
    - `num_runs`: how many published steps the law is of.
    - `table`: who published them.
    """

    model: Text
    fsdp: bool
    bias: float
    spread: Positive
    num_runs: int
    table: Text
    generation: str = ""
    software: str = ""

    @property
    def key(self) -> tuple[str, bool, str, str]:
        """What it is the class of."""
        return self.model, self.fsdp, self.generation, self.software


class ExpectedErrors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The laws of all classes (`kernels/expected_errors.toml`).

    **Attributes:**

    - `source`: where the runs are from, and the command that makes the file.
    - `degrees`: the degrees of freedom of Student's law.
    - `variability`: how much longer steps that vary take than `predict` says, as a share.
    - `unknown`: the factor on the spread for a class without runs.
    - `classes`: the classes.
    """

    source: Text
    degrees: Positive
    variability: NonNegative
    unknown: Positive
    classes: tuple[ErrorClass, ...]


def generation_of(device: str) -> str:
    """The generation of a device by its name: `A100`, `Hopper`, `Blackwell`, `TPU` or `other`."""
    generations = (name for part, name in _GENERATIONS.items() if re.search(part, device.lower()))
    return next(generations, "other")


@ft.cache
def load_expected_errors() -> ExpectedErrors:
    """The laws that are shipped."""
    path = data_folder("kernels") / "expected_errors.toml"
    return read_struct(path, "expected-errors", ExpectedErrors)
