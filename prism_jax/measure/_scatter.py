"""Splits the scatter of measured latencies into what varies with each call, with the moment, and
between devices.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


# A correlation nearer to one is a drift, which so few rounds do not tell from one.
_MOST_CORRELATED = 0.95


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Standard deviations of logarithms of latencies.

    **Attributes:**

    - `residual`: of each call by itself, for each kind of kernel.
    - `step`: of what all calls of a round have in common.
    - `autocorrelation`: of that in consecutive rounds.
    - `rank`: between devices; `None` if there is only one.
    """

    residual: dict[str, float]
    step: float
    autocorrelation: float
    rank: float | None = None

    @property
    def autocorrelation_time(self) -> float:
        r"""After how many rounds they are as good as new: $(1 + \rho) / (1 - \rho)$."""
        return (1 + self.autocorrelation) / (1 - self.autocorrelation)


def split_scatter(
    seconds: Float[np.ndarray, "devices calls rounds"], kinds: Sequence[str]
) -> Scatter:
    r"""Splits the scatter by the method of moments, for $\log t_{dcr} = m_c + u_d + s_{dr} +
    e_{dcr}$.

    Every second call of a round is in one half, and the others in the other. The times of the two
    halves over their means, $a_r$ and $b_r$, have only the moment in common, so
    $\exp(\sigma_s^2) - 1 = \mathrm{cov}(a_r, b_r)$, and its autocovariance is
    $\mathrm{cov}(a_r, b_{r+1})$. A call has $\sigma_e^2 = \mathrm{var}(\log t) - \sigma_s^2$;
    those of a kind count with the square of their latency, as they do in the variance of a step.
    Means of devices over the rounds vary by $\sigma_u^2$, and by what of the moments a mean over
    rounds leaves.

    A pause that is longer than a call but shorter than a round counts for the moment, because
    neighbouring calls are in different halves.

    **Arguments:**

    - `seconds`: latencies; at least two calls and three rounds.
    - `kinds`: the kind of kernel of each call.
    """
    rounds, means = seconds.shape[2], seconds.mean((0, 2))
    spread = np.var(np.log(seconds), axis=2, ddof=1).mean(0)
    halves = [seconds[:, start::2].sum(1) for start in (0, 1)]
    a, b = (half / half.mean(1, keepdims=True) - 1 for half in halves)
    common = max(float(np.mean(np.sum(a * b, axis=1) / (rounds - 1))), 0.0)
    beside = (a[:, :-1] * b[:, 1:] + b[:, :-1] * a[:, 1:]) / 2
    shared = float(np.mean(np.sum(beside, axis=1) / (rounds - 1)))
    correlation = min(max(shared / common, 0.0), _MOST_CORRELATED) if common else 0.0
    step, residual = math.log1p(common), {}
    for kind in dict.fromkeys(kinds):
        weights = means**2 * [each == kind for each in kinds]
        residual[kind] = math.sqrt(max(float(np.average(spread, weights=weights)) - step, 0.0))
    found = Scatter(residual, math.sqrt(step), correlation)
    if len(seconds) == 1:
        return found
    total = np.log(seconds.sum(1))
    left = np.var(total, axis=1, ddof=1).mean() / rounds * found.autocorrelation_time
    between = float(np.var(total.mean(1), ddof=1) - left)
    return dataclasses.replace(found, rank=math.sqrt(max(between, 0.0)))
