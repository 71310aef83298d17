"""What the measured step times of a job have taught about its kernels."""

from typing import Annotated, TypeAlias

import msgspec

from ._kernels import Kernels, Variation
from ._types import Count, NonNegative, Positive, Text
from ._variations import check_variation, replace_variations


# The order of the rows of a covariance.
LEVEL = ("compute", "network", "constant_s", "growth")

_Exponent: TypeAlias = Annotated[float, msgspec.Meta(ge=-1, le=1)]
_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
_Row: TypeAlias = tuple[_Number, _Number, _Number, _Number]


class Uncertainty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well a calibration is known.

    **Attributes:**

    - `covariance`: of what makes the level, in the order of `LEVEL`: of the logarithms of the two
        factors, of the constant in seconds, and of the exponent.
    - `prior`: which of these the step times say little of: their values are those of other systems.
    - `level`: the standard deviation of the logarithm of a run's level around what these explain.
    - `spread`: that of the spread of the steps of a run at another scale.
    """

    covariance: tuple[_Row, _Row, _Row, _Row]
    prior: tuple[Text, ...] = ()
    level: NonNegative = 0.0
    spread: NonNegative = 0.0


class Calibrated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes to the kernels of a job, from `calibrate`; a table of the job's file.

    **Attributes:**

    - `source`: the measurements.
    - `compute`: a factor on the mean latency of every compute kernel.
    - `variability`: laws in place of those that the kernels' profile has for the same component of
        the same kind.
    - `network`: a factor on whatever collectives do between nodes.
    - `constant_s`: what a step takes besides its kernels, in seconds.
    - `growth`, `num_replicas`: see `Kernels`.
    - `uncertainty`: how well all this is known.
    """

    source: Text
    compute: Positive = 1.0
    variability: tuple[Variation, ...] = ()
    network: Positive = 1.0
    constant_s: NonNegative = 0.0
    growth: _Exponent = 0.0
    num_replicas: Count = 1
    uncertainty: Uncertainty | None = None


def apply_calibrated(kernels: Kernels, calibrated: Calibrated, where: str) -> Kernels:
    """The kernels with the changes.

    **Raises:**

    A `ValueError` where a law is none: see `check_variation`.
    """
    for variation in calibrated.variability:
        check_variation(variation, where)
    return msgspec.structs.replace(
        kernels,
        compute=calibrated.compute,
        network=calibrated.network,
        constant_s=calibrated.constant_s,
        growth=calibrated.growth,
        num_replicas=calibrated.num_replicas,
        variability=replace_variations(kernels.variability, calibrated.variability),
    )
