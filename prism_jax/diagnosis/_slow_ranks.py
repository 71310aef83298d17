"""What measured slow ranks cost, and whether to keep, move or drain them."""

import dataclasses
import math

import jax
import numpy as np
from jaxtyping import Float
from scipy.special import ndtri

from .._estimate import typical
from .._misc import counted
from .._summary import Column, Shown, Table
from ..analysis import slow_rank
from ..data import Job
from ._changes import Simulated, simulated


# A rank is slow if it is this many robust deviations, and this share, above the median.
_DEVIATIONS, _LEAST = 4.0, 0.01
_NOTHING = 1e-4  # A share of a step that is not worth a restart.
_MOST = 8  # The slowest of more are simulated.
# A change is seen in 9 of 10 comparisons, and one that is none in 1 of 20.
_SEEN = float(ndtri(0.9) + ndtri(0.975))


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """**Attributes:**

    - `rank`, `factor`: the rank, and its time of compute over that of the median rank.
    - `pipeline_rank`: the pipeline rank that it is part of.
    - `p50`, `p95`: by how many seconds it alone makes a step longer there.
    - `moved_to`, `moved_p50`: the pipeline rank where it would cost least, and what it would cost
        there at p50, in seconds.
    - `drain_steps`: after how many steps a restart without it has paid, given how long that takes;
        `None` if it costs nothing.
    """

    rank: int
    factor: float
    pipeline_rank: int
    p50: float
    p95: float
    moved_to: int
    moved_p50: float
    drain_steps: float | None


@dataclasses.dataclass(frozen=True, repr=False)
class SlowRanks(Shown):
    """The result of `slow_ranks`.

    **Attributes:**

    - `ranks`: the slow ranks, that which costs most first.
    - `number`: how many ranks were measured.
    - `restart_s`: how long a restart without a rank takes, in seconds.
    - `steps_to_watch`: for a change of the step time by 1 %, how many steps before and after it
        must be compared to see it in 9 of 10 cases, if steps are independent.
    """

    ranks: tuple[SlowRank, ...]
    number: int
    restart_s: float
    steps_to_watch: int

    def summary(self) -> Table:
        """A row for each slow rank, and what pays."""
        columns = (
            "rank",
            Column("factor", form=".3f"),
            Column("pipeline rank", "pipeline_rank"),
            Column("p50", form="+.3g", unit="s"),
            Column("p95", form="+.3g", unit="s"),
            Column("best at", "moved_to"),
            Column("p50 there", "moved_p50", "+.3g", "s"),
            Column("drain pays after", "drain_steps", ",.0f", "steps"),
        )
        title = f"{counted(len(self.ranks), 'slow rank')} of {self.number:,}, and what each costs"
        notes = [
            f"a restart takes {self.restart_s:g} s; a change of 1 % shows in "
            f"{self.steps_to_watch:,} steps before and as many after it"
        ]
        return Table(columns, self.ranks, title, notes)


def slow_ranks(
    job: Job,
    factors: Float[np.ndarray, " ranks"],
    *,
    restart_s: float = 600.0,
    num_samples: int = 1024,
    key: "jax.Array",
) -> SlowRanks:
    """Finds the slow ones among measured ranks, and simulates what each alone costs, where it is
    and on every other pipeline rank, with common random numbers.

    **Arguments:**

    - `job`: a job with a model.
    - `factors`: for each rank, its time of compute over any common time, `(ranks,)`; ranks as in
        Megatron-LM: tensor- and context-parallel fastest, then replicas, then pipeline ranks.
    - `restart_s`: how long a restart without a rank takes, in seconds.
    - `num_samples`: how many steps to simulate of each case.
    - `key`: a `jax.random` key.

    **Raises:**

    `ValueError` unless there is a factor for each rank of the job.
    """
    number, pp = job.layout.world_size, job.layout.pp
    if factors.shape != (number,):
        raise ValueError(
            f"There are {len(factors):,} factors of ranks, and the job has {number:,} ranks; give "
            "one for each."
        )
    usual = simulated(job, num_samples, key)
    relative = factors / np.median(factors)
    deviation = float(typical(relative, (0,))[1][0])
    slow = np.flatnonzero(relative > 1 + max(_DEVIATIONS * deviation, _LEAST))
    slowest = slow[np.argsort(-relative[slow])][:_MOST]
    ranks = [_slow_rank(int(rank), relative, usual, number // pp, restart_s) for rank in slowest]
    cv = float(usual.steps.std() / usual.steps.mean())
    steps = max(2, math.ceil(2 * (_SEEN * cv / 0.01) ** 2))
    return SlowRanks((*sorted(ranks, key=lambda rank: -rank.p50),), number, restart_s, steps)


def _slow_rank(
    rank: int, relative: np.ndarray, usual: Simulated, peers: int, restart_s: float
) -> SlowRank:
    factor, here = float(relative[rank]), rank // peers
    program = usual.run.program
    costs = [
        np.quantile(usual.of(slow_rank(program, place, factor)), (0.5, 0.95))
        - np.quantile(usual.steps, (0.5, 0.95))
        for place in range(program.num_ranks)
    ]
    best = int(np.argmin([cost[0] for cost in costs]))
    p50, p95 = map(float, costs[here])
    moved = float(costs[best][0])
    step = float(np.median(usual.steps))
    steps = restart_s / p50 if p50 > _NOTHING * step else None
    return SlowRank(rank, factor, here, p50, p95, best, moved, steps)
