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
    """A figure that counts as much as so many observations of it, and where it is from."""

    value: Positive
    observations: NonNegative
    source: Text


class Sampled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A normal law whose mean and standard deviation were estimated from so many systems."""

    mean: _Number
    deviation: Positive
    number: Annotated[int, msgspec.Meta(ge=3)]
    source: Text


class SampledSpread(Sampled, frozen=True, forbid_unknown_fields=True):
    """That of systems of these devices; of any, where none is named."""

    devices: tuple[Text, ...]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure at the mean of another, its slope, and its standard deviation around the line."""

    mean: _Number
    slope: _Number
    deviation: NonNegative
    source: Text


class Priors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `calibrate` knows of any system: `kernels/priors.toml`.

    **Attributes:**

    - `network`, `constant_s`, `growth`: of the logarithm of the factor on communication between
        nodes, of the constant per step, and of the exponent of the replicas; see `Calibrated`.
    - `constant_share`: what the constant is of the shortest step at most.
    - `scale`: of the logarithm of a run's median around what these explain at other scales.
    - `configuration`: of the logarithm of a run's median over what is predicted without any run.
    - `system_spreads`, `system_shares`: of the logarithms of the spread of the core of a system,
        by its devices, and of its share of outliers.
    - `system_excess`: of the logarithm of what an outlier takes, in spreads of the core, by that of
        their share.
    - `spread_elsewhere`: of the logarithm of the spread of a run at another scale over that where
        it was calibrated.
    - `collective_noise`: of the logarithm of the standard deviation of the logarithm of what
        replicas do together, in a family of systems, and `collective_scale` of what each of these
        has besides.
    - `step_shared`: the share of the core's variance that a step has in common with the next, and
        `step_alone` the spread that it has alone and that no collective makes.
    - `step_spread`: the spread of the core of a run's steps.
    - `outlier_share`: the share of slow outliers among steps.
    - `outlier_excess`: by how many spreads of the core one is longer, and `outlier_spread` the
        spread of its logarithm.
    """

    network: Prior
    constant_s: Prior
    constant_share: Worth
    growth: Prior
    scale: Prior
    configuration: Prior
    system_spreads: tuple[SampledSpread, ...]
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
