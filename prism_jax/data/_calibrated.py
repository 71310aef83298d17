"""What the measured step times of a job have taught about its kernels."""

import math

import msgspec

from .._misc import unknown_name
from ._kernels import COMPONENTS, SHARED, Kernels, Variation
from ._types import Positive, Text


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
    new = {(v.kernel, v.component): v for v in calibrated.variability}
    kept = [v for v in kernels.variability if (v.kernel, v.component) not in new]
    return msgspec.structs.replace(
        kernels, compute=calibrated.compute, variability=(*kept, *new.values())
    )


# What the components have beyond the parameters of their laws.
_OWN = {"network": ("probability", "slowdown"), "stall": ("rate", "median_s")}


def check_variation(variation: Variation, where: str) -> None:
    """Raises a `ValueError` of one sentence where component, kind and numbers do not fit. What a
    family is and which parameters it has is known where programs are compiled.
    """
    family, component = variation.family, variation.component
    if component not in COMPONENTS:
        raise ValueError(f"{where}: {unknown_name('component', component, COMPONENTS)}")
    if (component in SHARED) != (variation.kernel == ""):
        wrong = "is shared; leave `kernel` empty" if variation.kernel else "needs a `kernel`"
        raise ValueError(f"{where}: the component `{component}` {wrong}.")
    if family != "constant" and (family == "two-regimes") != (component == "network"):
        raise ValueError(
            f"{where}: the component `{component}` cannot have the family `{family}`; `network` "
            "takes `two-regimes` or `constant`, all others any but `two-regimes`."
        )
    own = () if component == "network" and family == "constant" else _OWN.get(component, ())
    for name, number in variation.parameters.items():
        if component == "network" and name not in own:
            raise ValueError(f"{where}: {unknown_name('parameter', name, own)}")
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(
                f"{where}: `parameters` has `{name}={number:g}`; it must be finite and not "
                "negative."
            )
    missing = [name for name in own if name not in variation.parameters]
    if missing:
        raise ValueError(f"{where}: `parameters` has no `{missing[0]}`; add it.")
