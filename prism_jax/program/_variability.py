"""What makes latencies vary: each kernel by itself, and what many ops share (design: one rank, one
step, one worker in one step, one microbatch, the network, stalls)."""

from collections.abc import Iterable

import equinox as eqx
import jax.numpy as jnp
import msgspec
from jaxtyping import Array, Float

from ..data import Variation
from ..latency import AbstractLatency, Scaled, make_latency
from ._sets import Sets


class Network(eqx.Module):
    """A network that is calm in most steps and congested in the others, for all of a step.

    **Attributes:**

    - `probability`: the share of congested steps.
    - `slowdown`: latency of communication between nodes in a congested step over a calm one.
    """

    probability: Float[Array, ""]
    slowdown: Float[Array, ""]

    def factors(self) -> Float[Array, "2"]:
        """The factor on communication in a calm and in a congested step; its mean is one."""
        calm = 1 / (1 + self.probability * (self.slowdown - 1))
        return jnp.stack([calm, calm * self.slowdown])

    def probabilities(self) -> Float[Array, "2"]:
        return jnp.stack([1 - self.probability, self.probability])


class Stall(eqx.Module):
    """A rare long pause of a kernel.

    **Attributes:**

    - `rate`: stalls per call of the kernel and member.
    - `size`: how long one lasts, in seconds.
    """

    rate: Float[Array, ""]
    size: AbstractLatency


class Variability(eqx.Module):
    """The laws around the mean latencies. All but the sizes of stalls are factors: only their shape
    counts, for they are divided by their mean.

    **Attributes:**

    - `residual`: for each kind of kernel, its own noise; a kind that is missing is constant.
    - `rank`: the persistent factor of one GPU on its compute. `None`: all GPUs are equal.
    - `step`: the factor of one step on every op.
    - `worker_step`: the factor of one pipeline rank of one replica in one step on its compute,
        which the rank's GPUs share: it multiplies that of the slowest of them, and unlike it is
        drawn anew for each step. What follows the barrier of all ranks does not have it.
    - `microbatch`: the factor of a microbatch's data on all that is computed for it: a law of each
        by itself, or sets of those of one replica's step. What an op has of it is its kernel's
        `loading`.
    - `network`: the regime that all communication between nodes shares in a step.
    - `stalls`: for each kind of kernel that stalls, how.
    """

    residual: dict[str, AbstractLatency] = eqx.field(default_factory=dict)
    rank: AbstractLatency | None = None
    step: AbstractLatency | None = None
    worker_step: AbstractLatency | None = None
    microbatch: AbstractLatency | Sets | None = None
    network: Network | None = None
    stalls: dict[str, Stall] = eqx.field(default_factory=dict)


def variability_of(variations: Iterable[Variation]) -> Variability:
    """The laws that a file holds, or that are being fitted: the one map from values to laws.

    Differentiable in the parameters, which may be arrays.

    **Raises:**

    `ValueError` of one sentence where a family is unknown, or its parameters do not fit.
    """
    residual, stalls, shared = {}, {}, {}
    for variation in variations:
        if variation.component == "stall":
            stalls[variation.kernel] = _stall(variation)
        elif variation.family == "constant":
            continue
        elif variation.component == "network":
            shared["network"] = _network(variation)
        elif variation.component == "residual":
            residual[variation.kernel] = _law(variation)
        else:
            shared[variation.component] = _law(variation)
    return Variability(residual=residual, stalls=stalls, **shared)


def _law(variation: Variation) -> AbstractLatency:
    try:
        return make_latency(variation.family, variation.parameters)
    except ValueError as error:
        of = f" of `{variation.kernel}`" if variation.kernel else ""
        raise ValueError(f"the law of the {variation.component}{of}: {error}") from None


def _network(variation: Variation) -> Network:
    parameters = variation.parameters
    return Network(
        jnp.asarray(parameters["probability"], float), jnp.asarray(parameters["slowdown"], float)
    )


def _stall(variation: Variation) -> Stall:
    parameters = dict(variation.parameters)
    rate, median = parameters.pop("rate"), parameters.pop("median_s")
    law = _law(msgspec.structs.replace(variation, parameters=parameters))
    return Stall(jnp.asarray(rate, float), Scaled(law, median))
