"""Changes to the kernels of a job that were learned from measured step times."""

import math
from typing import Annotated, TypeAlias

import msgspec

from .._estimate import Estimate
from .._summary import Column, Shown, Table
from ._kernels import Kernels
from ._read import located
from ._types import Count, NonNegative, Number, Positive, Text
from ._variations import Variation, check_variation, replace_variations


# The order of the rows and columns of a covariance.
_LEVEL = {
    "compute": "compute takes this many times as long",
    "network": "collectives between nodes take this many times as long",
    "constant_s": "seconds added to each step",
    "growth": "compute takes (replicas)^this times as long",
}
LEVEL = (*_LEVEL,)

_Exponent: TypeAlias = Annotated[float, msgspec.Meta(ge=-1, le=1)]
_Row: TypeAlias = tuple[Number, Number, Number, Number]


class Uncertainty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The uncertainty of a calibration.

    **Attributes:**

    - `covariance`: the covariance of the four parameters of the level, in the order `compute`,
        `network`, `constant_s`, `growth`: the logarithms of the two factors, the constant in
        seconds, and the exponent.
    - `prior`: the parameters about which the step times say little, so that their values come from
        other systems.
    - `level`: the standard deviation of the logarithm of the level of a run around the level that
        these parameters give.
    - `spread`: the standard deviation of the logarithm of the spread of a run's steps at another
        scale.
    - `num_steps`: the number of measured steps, of all scales.
    - `of`: the class of jobs that they are of, as in `expected_error`. Jobs of another class do not
        have this uncertainty. Empty for any class.
    """

    covariance: tuple[_Row, _Row, _Row, _Row]
    prior: tuple[Text, ...] = ()
    level: NonNegative = 0.0
    spread: NonNegative = 0.0
    num_steps: Count = 1
    of: tuple[Text, ...] = ()


class Calibrated(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes to the kernels of a job, from `calibrate`; a table of the job file.

    **Attributes:**

    - `source`: which measurements the changes come from.
    - `compute`: a factor on the mean latency of every compute kernel.
    - `variability`: laws that replace those of the kernels' profile for the same component and
        kind.
    - `network`: a factor on the latency of all parts of collectives between nodes.
    - `constant_s`: the time that a step takes besides its kernels, in seconds.
    - `growth`, `num_replicas`: as in `Kernels`.
    - `uncertainty`: the uncertainty of these values.
    """

    source: Text
    compute: Positive = 1.0
    variability: tuple[Variation, ...] = ()
    network: Positive = 1.0
    constant_s: NonNegative = 0.0
    growth: _Exponent = 0.0
    num_replicas: Count = 1
    uncertainty: Uncertainty | None = None

    @property
    def level(self) -> dict[str, Estimate]:
        """The values of the level, with their standard errors."""
        found = {}
        for i, name in enumerate(LEVEL):
            value, known = getattr(self, name), self.uncertainty
            error = math.nan if known is None else known.covariance[i][i] ** 0.5
            # The uncertainty of the two factors is that of their logarithms.
            found[name] = Estimate(value, error * value if name in LEVEL[:2] else error)
        return found

    def summary(self) -> Table:
        prior = () if self.uncertainty is None else self.uncertainty.prior
        rows = [
            {"name": name, "value": value, "what": f"{_LEVEL[name]}{' (prior)' * (name in prior)}"}
            for name, value in self.level.items()
        ]
        note = (
            "(prior): mostly from other systems, because these steps determine little of it; runs "
            "at other scales would"
        )
        columns = (Column("level", "name"), "value", Column("meaning", "what"))
        return Table(columns, rows, "What calibration changed", [note] * bool(prior))


def apply_calibrated(kernels: Kernels, calibrated: Calibrated, where: str) -> Kernels:
    """The kernels with the changes.

    **Raises:**

    A `ValueError` for an invalid law: see `check_variation`.
    """
    with located(where):
        for variation in calibrated.variability:
            check_variation(variation)
    return msgspec.structs.replace(
        kernels,
        compute=calibrated.compute,
        network=calibrated.network,
        constant_s=calibrated.constant_s,
        constant_share=None,
        growth=calibrated.growth,
        num_replicas=calibrated.num_replicas,
        variability=replace_variations(kernels.variability, calibrated.variability),
    )
