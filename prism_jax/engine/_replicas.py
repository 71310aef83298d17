"""Samples of one replica, kept on the host, and which of them decides a step of R replicas."""

import dataclasses

import numpy as np

from ..program import Program
from ._replica import stratum_weights


# What is kept of a long run: its first samples, which stand for all of it, and its slowest ones.
RESERVOIR = 2**18
EXTREMES = 2**17


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Replica samples: the slowest of all, and the first, which stand for the rest.

    **Attributes:**

    - `ids`: `(n,)`, sample ids.
    - `ends`: `(ranks, n)`, when each pipeline rank ends, in seconds.
    - `score`: `(n,)`, the end of the slowest rank with its mean reduction of gradients: what the
        vector rule orders by.
    - `stratum`: `(n,)`.
    - `counts`: `(strata,)`, how many samples were drawn in each stratum, kept or not.
    """

    ids: np.ndarray
    ends: np.ndarray
    score: np.ndarray
    stratum: np.ndarray
    counts: np.ndarray


def no_replicas(num_ranks: int, num_strata: int, dtype) -> Replicas:
    return Replicas(
        ids=np.zeros(0, np.uint32),
        ends=np.zeros((num_ranks, 0), dtype),
        score=np.zeros(0, dtype),
        stratum=np.zeros(0, np.int32),
        counts=np.zeros(num_strata, np.int64),
    )


def add_replicas(kept: Replicas, ids, ends, score, stratum) -> Replicas:
    """Adds a batch and forgets what is neither early nor slow."""
    kept = Replicas(
        ids=np.concatenate([kept.ids, ids]),
        ends=np.concatenate([kept.ends, ends], axis=1),
        score=np.concatenate([kept.score, score]),
        stratum=np.concatenate([kept.stratum, stratum]),
        counts=kept.counts + np.bincount(stratum, minlength=len(kept.counts)),
    )
    if len(kept.ids) < RESERVOIR + 2 * EXTREMES:
        return kept
    slow = np.argpartition(kept.score, -EXTREMES)[-EXTREMES:]
    keep = kept.ids < RESERVOIR
    keep[slow] = True
    return dataclasses.replace(
        kept,
        ids=kept.ids[keep],
        ends=kept.ends[:, keep],
        score=kept.score[keep],
        stratum=kept.stratum[keep],
    )


def sample_weights(program: Program, kept: Replicas) -> np.ndarray:
    """The weight of each kept sample. Within a regime of the network they sum to one.

    A stratum's probability is spread over its samples. Where samples were forgotten, those that
    are slower than any forgotten one stand for themselves, and the first of the others for all the
    others. What is neither (slow among fewer samples than there are now) has no weight.
    """
    total = kept.counts.sum()
    probability = np.asarray(stratum_weights(program), np.float64)
    regime = np.array([s.regime for s in program.strata])
    shares = np.array([s.share for s in program.strata])
    probability = probability * shares / np.bincount(regime, shares)[regime]
    weights = np.zeros(len(kept.ids))
    forgotten = total > len(kept.ids)
    bound = np.partition(kept.score, -EXTREMES)[-EXTREMES] if forgotten else -np.inf
    for s, count in enumerate(kept.counts):
        members = kept.stratum == s
        if not members.any():
            continue
        alone = members & (kept.score >= bound)
        others = members & ~alone & (kept.ids < RESERVOIR)
        weights[alone] = probability[s] / count
        if others.any():
            weights[others] = probability[s] * (count - alone.sum()) / count / others.sum()
    for g in range(regime.max() + 1):
        members = regime[kept.stratum] == g
        if members.any():
            weights[members] /= weights[members].sum()
    return weights


@dataclasses.dataclass(frozen=True)
class Selection:
    """The law of the replica that decides a step, by the vector rule, for one regime.

    The step picks the replica whose rank among all is `exp(log(U) / R)`.

    **Attributes:**

    - `order`: `(n,)`, kept samples, the slowest first.
    - `weights`: `(n,)`, theirs, in that order; they sum to one.
    - `stratum`: `(n,)`, theirs, in that order.
    - `num_replicas`: R.
    """

    order: np.ndarray
    weights: np.ndarray
    stratum: np.ndarray
    num_replicas: int

    def pick(self, uniform: np.ndarray) -> np.ndarray:
        """Positions in `order`. The share from the top is `1 - U^(1/R)`, without cancellation."""
        share = -np.expm1(np.log(uniform) / self.num_replicas)
        position = np.searchsorted(np.cumsum(self.weights), share)
        return np.minimum(position, len(self.order) - 1)


def select(
    kept: Replicas, weights: np.ndarray, members: np.ndarray, num_replicas: int
) -> Selection:
    """Orders the samples for which `members` holds."""
    chosen = np.flatnonzero(members)
    # Ties are broken by id, so that the order does not depend on how the samples came.
    order = chosen[np.lexsort((kept.ids[chosen], -kept.score[chosen]))]
    return Selection(order, weights[order], kept.stratum[order], num_replicas)


def weight_derivatives(
    selection: Selection, position: np.ndarray, influence: np.ndarray
) -> np.ndarray:
    """The derivative of a mean over steps with respect to the weight of each replica sample.

    With `W_i = (1 - t_i)^R - (1 - t_i - w_i)^R` the probability that sample `i`, above which the
    weights sum to `t_i`, is picked, steps that picked it count `W_i(new) / W_i(old)` times.

    **Arguments:**

    - `position`: `(steps,)`, what each step picked.
    - `influence`: `(steps,)`, each step's contribution to the figure; they sum to it.

    **Returns:**

    `(n,)`, in the order of the selection. The weights are not normalised in this derivative.
    """
    R = selection.num_replicas
    weights = selection.weights
    total = np.bincount(position, influence, minlength=len(weights))
    above = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        upper = np.log1p(-np.minimum(above, 1))
        lower = np.log1p(-np.minimum(above + weights, 1))
        picked = np.exp(R * upper) * -np.expm1(R * (lower - upper))
        per_weight = np.where((total != 0) & (picked > 0), total / picked, 0)
        a = np.exp((R - 1) * upper) if R > 1 else np.ones_like(upper)
        b = np.exp((R - 1) * lower) if R > 1 else np.ones_like(lower)
    shift = R * (a - b) * per_weight
    below = np.concatenate([np.cumsum(shift[::-1])[::-1][1:], [0.0]])
    return R * b * per_weight - below


def standard_error(selection: Selection, position: np.ndarray, influence: np.ndarray) -> float:
    """The standard error that the replica samples, drawn anew, would give a mean over steps: the
    infinitesimal jackknife, i.e. resampling with Poisson weights in the limit of many resamples.

    A sample that many steps picked counts as the one sample that it is. The number of samples in
    each stratum is set, so only the scatter within strata counts.
    """
    slope = weight_derivatives(selection, position, influence)
    stratum, weights = selection.stratum, selection.weights
    total = np.bincount(stratum, weights)[stratum]
    centre = np.bincount(stratum, weights * slope)[stratum] / np.where(total > 0, total, 1)
    change = weights * (slope - centre)
    return float(np.sqrt(np.sum(change**2)))
