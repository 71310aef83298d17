"""What is known of a system before its step times are seen."""

import functools as ft
from typing import Annotated, TypeAlias

import msgspec

from .._files import shown
from ._find import data_folder
from ._read import convert, read_toml
from ._types import NonNegative, Positive, Text


_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]


class Prior(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A normal law of a figure over systems, and where it is from."""

    mean: _Number
    deviation: NonNegative
    source: Text


class Worth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure that counts as much as `observations` observations of it, and where it is from."""

    value: Positive
    observations: NonNegative
    source: Text


class Sampled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A normal law whose mean and standard deviation were estimated from `number` systems."""

    mean: _Number
    deviation: Positive
    number: Annotated[int, msgspec.Meta(ge=3)]
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
    number: Annotated[int, msgspec.Meta(ge=3)]
    systems: tuple[Text, ...]
    source: Text


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure as a line over another: its value at the mean of the other, its slope, and its
    standard deviation around the line.
    """

    mean: _Number
    slope: _Number
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
    drift: Prior
    drift_experts: Prior
    system_spread: SystemSpread
    system_shares: Sampled
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
    path = data_folder("kernels") / "priors.toml"
    return convert(read_toml(path, "priors"), Priors, lambda key: shown(path))
