"""What makes latencies vary: the noise of each kernel, stalls, and the factors that many ops share:
of a rank, a step, a worker in one step, a microbatch, and the network.
"""

import math
import statistics
from collections.abc import Callable, Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, Float
from scipy.special import ndtri

from ..data import SECONDS, Variation
from ..host import on_host
from ..latency import AbstractLatency, Empirical, Scaled, check, make_latency, scale_spread


class Sets(eqx.Module):
    """The factors of the data of microbatches, as stretches of measured factors. For each replica
    and step, a place in a stretch is drawn, all places with equal probability, and the microbatches
    take consecutive factors from there. So factors that were measured together stay together.

    Sets of length one make microbatches independent. Only the shape matters, because the engine
    divides by the mean.

    **Attributes:**

    - `factors`: a row of factors for each stretch. A parameter; everything is differentiable with
        respect to it.
    - `length`: how many factors are taken together, at most as many as a row has. Static.
    """

    factors: Float[Array, "stretches factors"]
    length: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if self.factors.ndim != 2 or not 1 <= self.length <= self.factors.shape[1]:
            raise ValueError(
                f"`Sets` got factors of shape {self.factors.shape} and a length of {self.length}; "
                "give a row for each stretch, none shorter than the length."
            )

    @property
    def dtype(self) -> jnp.dtype:
        """The floating dtype of the factors."""
        return self.factors.dtype

    def mean(self) -> Float[Array, ""]:
        """The mean factor of a microbatch."""
        return jnp.mean(self.factors @ jnp.asarray(self._weights(), self.dtype))

    def _weights(self) -> Float[np.ndarray, " factors"]:
        """How often a microbatch has each factor of a stretch: the shares of places."""
        number, last = self.factors.shape[1], self.factors.shape[1] - self.length
        taken = np.minimum(np.arange(number), last) - np.maximum(
            np.arange(number) - self.length, -1
        )
        return taken / taken.sum()

    def apart(self) -> Empirical:
        """The law of the factor of a microbatch by itself."""
        factors = np.asarray(self.factors, float)
        weights = np.broadcast_to(self._weights() / len(factors), factors.shape).ravel()
        order = np.argsort(factors, axis=None)
        below = np.cumsum(weights[order]) - weights[order] / 2
        levels = [statistics.NormalDist().cdf(z) for z in np.linspace(-6.0, 6.0, 129)]
        return Empirical(jnp.asarray(np.interp(levels, below, factors.ravel()[order]), self.dtype))

    def problem(self) -> str:
        """The problem with the values, for a message; empty if they are valid."""
        factors = np.asarray(self.factors)
        good = np.all(np.isfinite(factors) & (factors >= 0)) and np.any(factors > 0)
        return "" if good else "its factors must be finite, at least 0, and not all 0"


@scale_spread.register(Sets)
def _(law, factor):
    middle = law.mean()
    return Sets(middle + jnp.asarray(factor, law.dtype) * (law.factors - middle), law.length)


class Network(eqx.Module):
    """A network that is congested in some steps and calm in the others. It does not change within a
    step.

    **Attributes:**

    - `probability`: the share of congested steps.
    - `slowdown`: the latency of communication between nodes in a congested step, over that in a
        calm step.
    """

    probability: Float[Array, ""]
    slowdown: Float[Array, ""]

    def factors(self) -> Float[Array, "2"]:
        """The factor on communication in a calm and in a congested step; its mean is one."""
        calm = 1 / (1 + self.probability * (self.slowdown - 1))
        return jnp.stack([calm, calm * self.slowdown])

    def probabilities(self) -> Float[Array, "2"]:
        return jnp.stack([1 - self.probability, self.probability])

    def with_spread(self, factor: Float[Array, ""]) -> "Network":
        """The network whose congestion adds so many times as much."""
        return Network(self.probability, 1 + (self.slowdown - 1) * factor)


# Up to which share of congested steps each regime goes, and deviations of calm ones, with weights.
_SHARES = np.array([0, 0.3, 0.55, 0.75, 0.9, 0.97, 1.0])
_CALM, _CALM_SHARES = np.array([-1, 0, 1]) * 3**0.5, np.array([1, 4, 1]) / 6


class SharedNetwork(eqx.Module):
    r"""A network that a job shares with others. What congestion adds to the latency of
    communication between nodes is log-normal, from step to step; here in steps of its quantiles,
    each with the mean of its part. Unlike that of a [`Network`][], a factor is over the calm
    network, of which tables of collectives are, so that congestion makes steps longer on average.

    **Attributes:**

    - `probability`: the share of congested steps.
    - `slowdown`: the median latency of communication between nodes in a congested step, over that
        in a calm step.
    - `sigma`: the standard deviation of the logarithm of what congestion adds.
    - `calm_sigma`: the standard deviation of the factor in calm steps.
    """

    probability: Float[Array, ""]
    slowdown: Float[Array, ""]
    sigma: Float[Array, ""]
    calm_sigma: Float[Array, ""]

    def factors(self) -> Float[Array, "regimes"]:
        """The factor on communication in each regime; first the calm ones."""
        ends = norm.cdf(jnp.asarray(ndtri(_SHARES), self.sigma.dtype) - self.sigma)
        means = jnp.exp(self.sigma**2 / 2) * jnp.diff(ends) / np.diff(_SHARES)
        congested = 1 + (self.slowdown - 1) * means.astype(self.sigma.dtype)
        return jnp.concatenate([1 + self.calm_sigma * _CALM, congested]).astype(self.sigma.dtype)

    def probabilities(self) -> Float[Array, "regimes"]:
        calm, congested = (1 - self.probability) * _CALM_SHARES, self.probability * np.diff(_SHARES)
        return jnp.concatenate([calm, congested]).astype(self.probability.dtype)

    def with_spread(self, factor: Float[Array, ""]) -> "SharedNetwork":
        """The network whose congestion adds so many times as much, and whose calm steps vary so
        many times as much."""
        slowdown = 1 + (self.slowdown - 1) * factor
        return SharedNetwork(self.probability, slowdown, self.sigma, self.calm_sigma * factor)


class Stall(eqx.Module):
    """A rare long pause of a kernel.

    **Attributes:**

    - `rate`: the expected number of stalls in one call of the kernel on one member (GPU).
    - `size`: the law of the duration of a stall, in seconds.
    """

    rate: Float[Array, ""]
    size: AbstractLatency


class Variability(eqx.Module):
    """The laws around the mean latencies. All laws except the sizes of stalls are laws of factors.
    Only their shape matters, because they are divided by their mean.

    **Attributes:**

    - `residual`: for each kind of kernel, the law of its own noise. A kind that is missing is
        constant.
    - `rank`: the law of the persistent factor of a GPU on its compute. `None` if all GPUs are
        equal.
    - `step`: the law of the factor of a step on all of its ops, also those after the barrier of all
        ranks.
    - `worker_step`: the law of the factor of a worker in one step on its compute: of the tensor-
        and context-parallel GPUs of one pipeline rank and one data-parallel copy, which share it.
        Unlike that of a GPU, it is drawn anew for each step. It does not act on what runs after the
        barrier of all ranks.
    - `microbatch`: the law of the factor of a microbatch's data on the compute for this microbatch:
        either one law for independent microbatches, or sets of factors that the microbatches of a
        replica in one step take together; where replicas wait for one another within a microbatch,
        each microbatch takes a factor by itself. It does not act on collectives. How strongly it
        acts on an op of a single kernel is the `loading` of this kernel.
    - `network`: the regime that all communication between nodes shares in a step.
    - `stalls`: the stalls of each kind of kernel that stalls.
    """

    residual: dict[str, AbstractLatency] = eqx.field(default_factory=dict)
    rank: AbstractLatency | None = None
    step: AbstractLatency | None = None
    worker_step: AbstractLatency | None = None
    microbatch: AbstractLatency | Sets | None = None
    network: Network | SharedNetwork | None = None
    stalls: dict[str, Stall] = eqx.field(default_factory=dict)


def variability_of(
    variations: Iterable[Variation],
    *,
    step_s: float = math.inf,
    experts: bool = False,
    by_power: Callable[[], AbstractLatency] | None = None,
    excess: Callable[[float], float] | None = None,
) -> Variability:
    """The laws with the values of a file, or with values that are being fitted.

    Differentiable in the parameters, which may be arrays.

    **Arguments:**

    - `variations`: the laws.
    - `step_s`: how long a step takes, in seconds: for the part of the spread of steps that is given
        in seconds (`Variation`).
    - `experts`: whether the model has experts, whose steps vary by more seconds.
    - `by_power`: makes the law of the rank of the family `power`, which a job's device determines.
    - `excess`: how much longer a step takes, as a share, where communication between nodes takes so
        many times as long: for the largest such share that is given (`step_excess`).

    **Raises:**

    `ValueError` of one sentence if a family is unknown or its parameters are not valid.
    """
    residual, stalls, shared = {}, {}, {}
    for variation in variations:
        if variation.component == "step":
            variation = _of_seconds(variation, step_s, experts)
        if variation.component == "stall":
            stalls[variation.kernel] = _stall(variation)
        elif variation.family == "constant":
            continue
        elif variation.component == "network":
            shared["network"] = _network(variation, excess, step_s)
        elif variation.component == "residual":
            residual[variation.kernel] = _law(variation)
        elif variation.component == "rank" and variation.family == "power" and by_power:
            shared["rank"] = by_power()
        else:
            shared[variation.component] = _law(variation)
    return Variability(residual=residual, stalls=stalls, **shared)


def _of_seconds(variation: Variation, step_s: float, experts: bool) -> Variation:
    """The law with a spread that has no part in seconds."""
    parameters = dict(variation.parameters)
    dense, of_experts, most = (parameters.pop(name, None) for name in SECONDS)
    seconds = of_experts if experts and of_experts is not None else dense
    if seconds is not None:
        part = seconds / step_s
        part = part if most is None else min(part, most)
        parameters["sigma"] = math.hypot(parameters.get("sigma", 0.0), part)
    return msgspec.structs.replace(variation, parameters=parameters)


def _law(variation: Variation) -> AbstractLatency:
    try:
        return make_latency(variation.family, variation.parameters)
    except ValueError as error:
        of = f" of `{variation.kernel}`" if variation.kernel else ""
        raise ValueError(f"the law of the {variation.component}{of}: {error}") from None


def _network(
    variation: Variation, excess: Callable[[float], float] | None, step_s: float
) -> Network | SharedNetwork:
    parameters = variation.parameters
    if variation.family == "spells":
        lasts = parameters["spell_s"]
        congested = math.exp(-step_s / lasts) if lasts else 0.0
        values = (parameters[name] for name in ("slowdown", "sigma", "calm_sigma"))
        return SharedNetwork(_parameter(congested), *map(_parameter, values))
    slowdown, most = parameters["slowdown"], parameters.get("step_excess")
    if most is not None and excess is not None and (longer := excess(slowdown)) > most:
        # A step is convex in the latencies of its kernels, so it takes no longer than this.
        slowdown = 1 + (slowdown - 1) * most / longer
    return Network(_parameter(parameters["probability"]), _parameter(slowdown))


def _stall(variation: Variation) -> Stall:
    parameters = dict(variation.parameters)
    rate, median = parameters.pop("rate"), parameters.pop("median_s")
    law = _law(msgspec.structs.replace(variation, parameters=parameters))
    return Stall(_parameter(rate), Scaled(law, median))


def _parameter(value: float) -> Float[Array, ""]:
    return jax.device_put(np.float64(value))  # In the default dtype, and nothing is compiled.


def all_laws(variability: Variability) -> dict[str, AbstractLatency]:
    """All laws by what they are laws of; first the residuals, in the order of the kinds' names."""
    laws = {f"residual of {kind}": law for kind, law in sorted(variability.residual.items())}
    for kind, stall in sorted(variability.stalls.items()):
        laws[f"stall of {kind}"] = stall.size
    for name in ("rank", "step", "worker_step", "microbatch"):
        law = getattr(variability, name)
        if isinstance(law, AbstractLatency):
            laws[f"{name} factor"] = law
    return laws


def check_variability(variability: Variability) -> None:
    """Raises a `ValueError` of one sentence if a law or a rate has impossible parameters."""
    sets = variability.microbatch
    if isinstance(sets, Sets) and (problem := sets.problem()):
        raise ValueError(f"The law of the microbatch factor cannot be used: {problem}.")
    for name, law in all_laws(variability).items():
        try:
            check(law)
        except ValueError as error:
            raise ValueError(f"The law of the {name} cannot be used: {error}") from None
    for kind, stall in variability.stalls.items():
        if not 0 <= float(stall.rate) < 1:
            raise ValueError(
                f"The stall rate of `{kind}` is {float(stall.rate)}; it counts stalls per call and "
                "must be at least 0 and below 1."
            )
    network = variability.network
    if network is not None and not (
        0 <= float(network.probability) < 1
        and np.asarray(on_host(type(network).factors, network)).min() > 0
    ):
        raise ValueError(
            f"The network is congested with probability {float(network.probability)} and slowdown "
            f"{float(network.slowdown)}; give a probability in [0, 1) and a positive slowdown."
        )
