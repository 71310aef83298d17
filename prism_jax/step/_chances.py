"""How likely the strata of replica samples and the regimes of the network are."""

import dataclasses

import numpy as np

from ..program import Program
from ..replica import Plan, strata_columns


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
    regime, stalls, share = strata_columns(program)
    of_regime = (share / np.bincount(regime, share)[regime]).astype(counts.dtype)
    weight = counts[stalls] / of_regime
    return Chances(regime, share, weight.astype(np.float64), network / network.sum())
