"""What the measured step times of a job have taught about its kernels."""

import msgspec

from ._kernels import Kernels, Variation
from ._types import Positive, Text
from ._variations import check_variation, replace_variations


class Calibrated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes to the kernels of a job, from `calibrate`; a table of the job's file.

    **Attributes:**

    - `source`: the measurements.
    - `compute`: a factor on the mean latency of every compute kernel.
    - `variability`: laws in place of those that the kernels' profile has for the same component of
        the same kind.
    """

    source: Text
    compute: Positive = 1.0
    variability: tuple[Variation, ...] = ()


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
        variability=replace_variations(kernels.variability, calibrated.variability),
    )
