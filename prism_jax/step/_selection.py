"""The replica samples that decide a step of R replicas, and their weights."""

import dataclasses
import functools as ft

import numpy as np

from ..program import Program
from ..replica import Plan
from ._reservoir import EXTREMES, RESERVOIR, Replicas


@dataclasses.dataclass(frozen=True)
class Chances:
    """The probabilities of a program's strata and of the regimes of its network, on the host.

    **Attributes:**

    - `regime`, `share`: for each stratum, its regime and its share of the samples.
    - `weight`: for each stratum, the weight of each of its samples within the regime; one if
        samples follow the law.
    - `network`: the probability of each regime.
    """

    regime: np.ndarray
    share: np.ndarray
    weight: np.ndarray
    network: np.ndarray

    @property
    def alike(self) -> bool:
        """Whether all samples of a regime weigh the same if they are drawn by their law."""
        return len(self.regime) == len(self.network)


def chances_of(program: Program, plan: Plan) -> Chances:
    """See [`Chances`][]."""
    counts, network = (
        np.asarray(plan.tables.stall_counts),
        np.asarray(plan.tables.network, np.float64),
    )
    regime = np.array([s.regime for s in program.strata])
    share = np.array([s.share for s in program.strata])
    of_regime = (share / np.bincount(regime, share)[regime]).astype(counts.dtype)
    weight = counts[[s.stalls for s in program.strata]] / of_regime
    return Chances(regime, share, weight.astype(np.float64), network / network.sum())


def sample_weights(chances: Chances, kept: Replicas) -> np.ndarray:
    """The weight of each kept sample. Within a regime of the network they sum to one.

    The probability of a stratum is divided among its samples. If samples were dropped, those that
    are slower than any dropped sample represent themselves, and the first of the others represent
    all others. Samples that are neither (slow among fewer samples than there are now, or as slow as
    a dropped one) have no weight.

    **Arguments:**

    - `chances`: of the program's strata.
    """
    weights = kept.likelihood.astype(np.float64)
    forgotten = kept.counts.sum() > len(kept.ids)
    if len(kept.counts) == 1 and not forgotten:
        weights /= weights.sum()
        return weights
    regime = chances.regime
    probability = chances.weight * chances.share / np.bincount(regime, chances.share)[regime]
    bound = np.partition(kept.score, -EXTREMES)[-EXTREMES] if forgotten else -np.inf
    slow = kept.score > bound
    early = kept.ids - np.uint32(kept.first) < RESERVOIR
    weights[~(slow | early)] = 0
    for s, count in enumerate(kept.counts):
        members = kept.stratum == s
        if not members.any():
            continue
        weights[members & slow] /= count
        others = members & ~slow
        if others.any():
            rest = max(1 - weights[members & slow].sum(), 0)
            weights[others] *= rest / weights[others].sum()
        weights[members] *= probability[s] / weights[members].sum()
    for g in range(regime.max() + 1):
        members = regime[kept.stratum] == g
        if members.any():
            weights[members] /= weights[members].sum()
    return weights


@dataclasses.dataclass(frozen=True)
class Selection:
    """The law of the replica that decides a step, by the vector rule, for one regime.

    The step picks the replica sample at rank `1 - (1 - U)^(1 / R)` from the slowest, `U` uniform.

    **Attributes:**

    - `order`: `(n,)`, the kept samples that steps can pick, the slowest first.
    - `weights`: `(n,)`, their weights in this order; with those of the rest they sum to one.
    - `stratum`: `(n,)`, their strata in this order.
    - `num_replicas`: R.
    - `mass`: `(strata,)`, the weight of all samples of each stratum.
    """

    order: np.ndarray
    weights: np.ndarray
    stratum: np.ndarray
    num_replicas: int
    mass: np.ndarray

    def pick(self, rank: np.ndarray) -> np.ndarray:
        """Positions in `order`: the first sample for which the probability that a step picks it or
        a slower sample is at least `rank`.
        """
        return np.searchsorted(self._reached, rank)

    @ft.cached_property
    def _reached(self) -> np.ndarray:
        """The probability that a step picks each sample or a slower one."""
        reached = self.cumulative
        if self.num_replicas > 1:
            reached = -np.expm1(self.num_replicas * np.log1p(-np.minimum(reached, 1 - 1e-16)))
        return reached[:-1]  # The last sample takes the rest.

    @ft.cached_property
    def picked(self) -> np.ndarray:
        """The probability that a step picks each sample."""
        if self.num_replicas == 1:
            return self.weights
        R, (upper, lower) = self.num_replicas, self._faster
        with np.errstate(invalid="ignore"):
            picked = np.exp(R * upper) * -np.expm1(R * (lower - upper))
        return np.where(upper > lower, picked, 0)

    @ft.cached_property
    def _faster(self) -> tuple[np.ndarray, np.ndarray]:
        """The logarithms of the weight of all samples that are not slower than each, and of all
        that are faster.
        """
        with np.errstate(divide="ignore"):
            upper = np.log1p(-np.minimum(self.cumulative - self.weights, 1))
            return upper, np.log1p(-np.minimum(self.cumulative, 1))

    def reweighted(self, factors: np.ndarray) -> "Selection":
        """The selection with a factor on the weight of each sample, in this order. The weight of a
        stratum stays what it is; that of samples that no step picks only follows.
        """
        weights, number = self.weights * factors, len(self.mass)
        change = np.bincount(self.stratum, weights - self.weights, number)
        scale = np.divide(self.mass, self.mass + change, out=np.ones(number), where=self.mass > 0)
        return dataclasses.replace(self, weights=weights * scale[self.stratum])

    @ft.cached_property
    def cumulative(self) -> np.ndarray:
        """The weight of all samples from the slowest up to and including each."""
        return np.cumsum(self.weights)

    @ft.cached_property
    def _slopes(self) -> tuple[np.ndarray, np.ndarray]:
        """The derivative of a figure with respect to the logarithm of a sample's own weight, and to
        the weights of faster samples, per contribution of the sample: see `weight_derivatives`.
        """
        R = self.num_replicas
        if R == 1:
            return (self.weights > 0).astype(float), np.zeros(0)
        upper, lower = self._faster
        a, b = np.exp((R - 1) * upper), np.exp((R - 1) * lower)
        picked, possible = self.picked, self.picked > 0
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            own = np.where(possible, R * b * self.weights / picked, 0)
            others = np.where(possible, R * (a - b) / picked, 0)
        return own, others

    def weight_derivatives(self, total: np.ndarray) -> np.ndarray:
        """The derivative of a mean over steps with respect to the logarithm of the weight of each
        replica sample.

        With `W_i = (1 - t_i)^R - (1 - t_i - w_i)^R` the probability that sample `i`, above which
        the weights sum to `t_i`, is picked, steps that picked it count `W_i(new) / W_i(old)` times.

        **Arguments:**

        - `total`: `(n,)`, the contributions to the figure of the steps that picked each sample.

        **Returns:**

        `(n,)`, in the order of the selection. The weights are not normalised in this derivative.
        """
        own, others = self._slopes
        change = own * total
        if self.num_replicas > 1:
            moved = np.cumsum(others * total)
            moved -= moved[-1]
            moved *= self.weights
            change += moved
        return change


def select(
    kept: Replicas, weights: np.ndarray, members: np.ndarray, num_replicas: int
) -> Selection:
    """Orders those of the samples for which `members` holds that steps reach."""
    chosen = np.flatnonzero(members)
    score = kept.score[chosen]
    # Ties are broken by id, so that the order does not depend on how the samples came.
    if score.dtype == np.float32 and np.all(score >= 0):
        # The bits of a positive float are in its order: one sort of integers, several times faster.
        key = (~score.view(np.uint32)).astype(np.uint64) << np.uint64(32)
        key |= np.arange(len(chosen), dtype=np.uint64)
        order = chosen[(np.sort(key) & np.uint64(2**32 - 1)).astype(np.int64)]
    else:
        order = chosen[np.argsort(-score, kind="stable")]
    weight, stratum = weights[order], kept.stratum[order]
    # Beyond this share from the top lies no decisive replica, but for one step in 1e11.
    share = -np.expm1(-25 / num_replicas)
    reached = min(int(np.searchsorted(np.cumsum(weight), share)) + 1, len(order))
    return Selection(
        order=order[:reached].copy(),  # A view would keep the rest.
        weights=weight[:reached].copy(),
        stratum=stratum[:reached].copy(),
        num_replicas=num_replicas,
        mass=np.bincount(stratum, weight, len(kept.counts)),
    )
