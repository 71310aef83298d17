"""What calibration moves, and the laws that it stands for."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array

from ..cluster import COLLECTIVES
from ..data import Kernels, Variation, replace_variations
from ..program import Program, variability_of
from ._observe import Observed
from ._stall_prior import size_spread


# What changes from step to step by itself is put down to collectives, of which those between steps
# are averaged by nothing, up to this spread; and to microbatches a part of that. Sequences are
# packed to one length in pre-training, so that the compute of a microbatch hardly changes. What is
# wider still is put down to the step as a whole.
WILDEST = 0.4
_MICROBATCH_PART = 1 / 30
# The kinds of kernel that `spread` applies to; `others` to the rest.
_WILD = ("all_gather", "reduce_scatter")


class Values(eqx.Module):
    """What is calibrated.

    **Attributes:**

    - `level`: a factor on the mean latency of compute.
    - `step`: the spread of what a step shares with the next.
    - `spread`: that of collectives, and in part of microbatches.
    - `others`: a factor on the spread of all other kernels, where even no `spread` is too wide.
    - `rate`, `size`: stalls per call, and the median of their length in seconds; `rate` is zero
        where there are none.
    """

    level: Array
    step: Array
    spread: Array
    others: Array
    rate: Array
    size: Array


def values_of(**numbers: float) -> Values:
    """Values from numbers, all of which must be given."""
    return Values(**{name: jnp.asarray(number, float) for name, number in numbers.items()})


def with_values(value: Values, **changes: float) -> Values:
    """The same values but for some."""
    dtype = value.level.dtype
    return dataclasses.replace(value, **{k: jnp.asarray(x, dtype) for k, x in changes.items()})


def laws_of(
    kernels: Kernels, observed: Observed, value: Values, source: str
) -> tuple[Variation, ...]:
    """The laws that values stand for: of everything but GPUs, which differ for good.

    Their parameters are arrays, so that laws can be differentiated in the values; `as_numbers` are
    what a file holds.

    **Arguments:**

    - `kernels`: of the job, before.
    - `observed`: whether there are stalls, and how their sizes spread.
    - `value`, `source`: the values, and where they are from.
    """

    def law(kernel: str, component: str, family: str = "lognormal", **parameters: Any) -> Variation:
        return Variation(kernel, component, family, parameters, source)

    wild = jnp.minimum(value.spread, WILDEST)
    laws = [
        law("", "network", "constant"),
        law("", "step", sigma=value.step),
        law("", "microbatch", sigma=value.spread * _MICROBATCH_PART),
        *(law(kind, "residual", sigma=wild) for kind in _WILD),
    ]
    if value.others < 1:
        for v in kernels.variability:
            if v.component == "residual" and v.kernel not in _WILD and v.family == "lognormal":
                narrower: dict[str, Any] = {"sigma": value.others * v.parameters["sigma"]}
                laws.append(msgspec.structs.replace(v, parameters=narrower))
    if len(observed.excess):
        sigma = size_spread(observed.excess)
        laws.append(law("gemm", "stall", sigma=sigma, median_s=value.size, rate=value.rate))
    return tuple(laws)


def as_numbers(laws: tuple[Variation, ...]) -> tuple[Variation, ...]:
    """The same laws, with numbers in place of arrays."""
    return tuple(
        msgspec.structs.replace(v, parameters={k: float(x) for k, x in v.parameters.items()})
        for v in laws
    )


def program_with(program: Program, kernels: Kernels, observed: Observed, value: Values) -> Program:
    """The program with these values, and with the law of GPUs that it has. Differentiable in them.

    **Arguments:**

    - `program`: of the job.
    - `kernels`, `observed`, `value`: as of `laws_of`.
    """
    table = program.latencies
    is_compute = np.array([kind not in COLLECTIVES for kind in table.kinds])[table.kind.value]
    mean = table.mean * jnp.where(is_compute, value.level, 1).astype(table.mean.dtype)
    laws = replace_variations(kernels.variability, laws_of(kernels, observed, value, ""))
    return dataclasses.replace(
        program,
        latencies=dataclasses.replace(table, mean=mean),
        variability=dataclasses.replace(variability_of(laws), rank=program.variability.rank),
    )
