"""What measured slow ranks cost, and whether to keep, move or drain them."""

import dataclasses
import math

import jax
import numpy as np
from jaxtyping import Float
from scipy.special import ndtri

from .._estimate import typical
from .._misc import plural
from .._summary import Column, Shown, Table
from ..analysis import Scenario, slow_rank
from ..data import Failures, Job
from ..logs import RankFactors
from ..program import compile_job
from ..runs import waiting_share
from ._changes import simulated, with_bandwidth


# A rank is slow if it is this many robust deviations, and this share, above the median.
_DEVIATIONS, _LEAST = 4.0, 0.01
_NOTHING = 1e-4  # A share of a step that is not worth a restart.
_MOST = 8  # The slowest of more are simulated.
_DAY = 86_400.0
# A change is seen in 9 of 10 comparisons, and one that is none in 1 of 20.
_SEEN = float(ndtri(0.9) + ndtri(0.975))


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """**Attributes:**

    - `rank`, `slow`, `factor`: the rank, or the first of those that were measured together; what is
        slow, `compute` or `collectives`; and its time for that over the median rank's.
    - `p50`, `p95`: by how many seconds it alone makes a step longer there.
    - `steps_to_watch`: to see in 9 of 10 cases that a step is shorter by that p50, how many steps
        before and after must be compared, if steps are independent; `None` if it costs nothing.
    - `pipeline_rank`, `moved_to`: its pipeline rank, and that where it would cost least; of slow
        collectives, which cost as much on any rank, `None`.
    - `moved_p50`: what it would cost there at p50, in seconds.
    - `move_steps`, `drain_steps`: after how many steps a restart has paid, with it there, or
        without it; `None` for never.
    - `pays`: `keep`, `move` or `drain`, which loses least time over the steps that are left.
    """

    rank: int
    slow: str
    factor: float
    p50: float
    p95: float
    steps_to_watch: int | None
    pipeline_rank: int | None
    moved_to: int | None
    moved_p50: float
    move_steps: float | None
    drain_steps: float | None
    pays: str


@dataclasses.dataclass(frozen=True, repr=False)
class SlowRanks(Shown):
    """The result of `slow_ranks`.

    **Attributes:**

    - `ranks`: the slow ranks, that which costs most first.
    - `number`, `each`: how many ranks were measured, and how many together.
    - `restart_s`, `wait_s`: how long a restart takes, and what draining waits besides, in seconds.
    - `num_steps`: over how many steps it is said what pays.
    - `steps_to_watch`: as of a rank, for a change of the step time by 1 %. A change of x % takes
        1 / x^2 of them.
    """

    ranks: tuple[SlowRank, ...]
    number: int
    each: int
    restart_s: float
    wait_s: float
    num_steps: int
    steps_to_watch: int

    def summary(self) -> Table:
        """A row for each slow rank, and what pays."""
        columns = (
            "rank",
            "slow",
            Column("factor", form=".3f"),
            Column("p50", form="+.3g", unit="s"),
            Column("p95", form="+.3g", unit="s"),
            Column("seen in", "steps_to_watch", ",", "steps"),
            Column("pipeline rank", "pipeline_rank"),
            Column("best at", "moved_to"),
            Column("p50 there", "moved_p50", "+.3g", "s"),
            Column("move pays after", "move_steps", ",.0f", "steps"),
            Column("drain pays after", "drain_steps", ",.0f", "steps"),
            "pays",
        )
        title = f"{plural(len(self.ranks), 'slow rank')} of {self.number:,}, and what each costs"
        notes = [
            f"pays: over {plural(self.num_steps, 'step')}; a restart takes {self.restart_s:g} s, "
            f"and without a rank {self.wait_s:.3g} s more, until there is a spare",
            f"seen in so many steps before and after; a change of 1 % in {self.steps_to_watch:,}, "
            "of x % in 1 / x^2 of these",
        ]
        if self.each > 1:
            notes.append(f"each row is of {self.each} ranks, from its rank on")
        if any(rank.slow == "collectives" for rank in self.ranks):
            notes.append("slow collectives cost at most this, as if each group had such a rank")
        return Table(columns, self.ranks, title, notes)


def wait_for_spare(
    failures: Failures, devices: int, repair_s: float, num_spares: int | None
) -> float:
    """How long a run waits because a node was drained, in seconds: for the time of a repair it has
    one spare less for the nodes that interruptions take, and without a spare it waits at once.

    **Arguments:**

    - `failures`: the counts of interruptions.
    - `devices`: the GPUs of the run.
    - `repair_s`: until a node that was drained can be used as a spare, in seconds.
    - `num_spares`: the spare nodes; `None` if there is always one more.
    """
    if not num_spares:
        return 0.0 if num_spares is None else repair_s
    taken = sum(cause.count for cause in failures.causes if cause.takes_node)
    rate = taken * devices / (failures.device_hours * 3600)
    all_but_one, all_spares = (
        waiting_share(rate, repair_s, n) for n in (num_spares - 1, num_spares)
    )
    return repair_s * (all_but_one - all_spares)


def slow_ranks(
    job: Job,
    measured: RankFactors,
    *,
    restart_s: float = 600.0,
    wait_s: float = 0.0,
    num_steps: int | None = None,
    num_samples: int = 1024,
    key: "jax.Array",
) -> SlowRanks:
    """Finds the slow ones among measured ranks, and simulates what each alone costs, where it is
    and on every other pipeline rank, with common random numbers.

    **Arguments:**

    - `job`: a job with a model.
    - `measured`: from `read_ranks`; ranks as in Megatron-LM: tensor- and context-parallel fastest,
        then replicas, then pipeline ranks.
    - `restart_s`: how long a restart takes, in seconds.
    - `wait_s`: how much longer one without the rank takes; see `wait_for_spare`.
    - `num_steps`: the steps that are left; those of a day by default.
    - `num_samples`: how many steps to simulate of each case.
    - `key`: a `jax.random` key.

    **Raises:**

    `ValueError` unless there is a factor for each rank of the job.
    """
    number, peers = job.layout.world_size, job.layout.world_size // job.layout.pp
    usual = simulated(job, num_samples, key)
    before = np.quantile(usual.steps, (0.5, 0.95))
    program, cv = usual.run.program, float(usual.steps.std() / usual.steps.mean())
    num_steps = max(1, round(_DAY / before[0])) if num_steps is None else num_steps
    each = min(measured.each, peers)  # Of a node with several pipeline ranks, one row for each.

    def steps_to_see(share: float) -> int:
        return max(2, math.ceil(2 * (_SEEN * cv / share) ** 2))

    def longer(scenario: Scenario) -> np.ndarray:
        return np.quantile(usual.of(scenario), (0.5, 0.95)) - before

    def row(rank: int, slow: str, factor: float) -> SlowRank:
        here = moved_to = None
        if slow == "compute":
            here, replicas = rank // peers, max(1, each // program.group_size)
            costs = [
                longer(slow_rank(program, place, factor, replicas=replicas))
                for place in range(program.num_ranks)
            ]
            p50, p95 = map(float, costs[here])
            moved_to = int(np.argmin([cost[0] for cost in costs]))
            moved = float(costs[moved_to][0])
        else:
            p50, p95 = map(float, longer(Scenario(compile_job(with_bandwidth(job, 1 / factor)))))
            moved = p50
        least = _NOTHING * before[0]
        seen = steps_to_see(p50 / before[0]) if p50 > least else None
        # What each choice loses: at once, and with each step.
        loses = {"keep": (0.0, p50), "move": (restart_s, moved), "drain": (restart_s + wait_s, 0.0)}
        pays, after = _what_pays(loses, num_steps, least)
        place = here, moved_to, moved, after["move"], after["drain"]
        return SlowRank(rank, slow, factor, p50, p95, seen, *place, pays)

    rows = []
    for slow, factors in (("compute", measured.compute), ("collectives", measured.collectives)):
        if factors is None:
            continue
        if factors.shape != (number,):
            raise ValueError(
                f"There are {len(factors):,} factors of ranks, and the job has {number:,} ranks; "
                "give one for each."
            )
        rows += [row(rank, slow, factor) for rank, factor in _slowest(factors, each)]
    rows.sort(key=lambda slow_rank: -slow_rank.p50)
    costs = restart_s, wait_s, num_steps
    return SlowRanks(tuple(rows), number, each, *costs, steps_to_see(0.01))


def _what_pays(
    loses: dict[str, tuple[float, float]], num_steps: int, least: float
) -> tuple[str, dict[str, float | None]]:
    """The choice that loses least over the steps that are left, and after how many steps each has
    paid; `None` for one that gains no more than `least` in a step.
    """
    _, kept = loses["keep"]
    after = {
        choice: at_once / (kept - each_step) if kept - each_step > least else None
        for choice, (at_once, each_step) in loses.items()
    }
    return min(loses, key=lambda choice: loses[choice][0] + num_steps * loses[choice][1]), after


def _slowest(factors: Float[np.ndarray, " ranks"], each: int) -> list[tuple[int, float]]:
    """The first of every `each` ranks that are slow, and their factors over the median rank's, the
    slowest first.
    """
    relative = factors / np.median(factors)
    deviation = float(typical(relative, (0,))[1][0])
    limit = 1 + max(_DEVIATIONS * deviation, _LEAST)
    slow = [rank for rank in range(0, len(factors), each) if relative[rank] > limit]
    slow.sort(key=lambda rank: -relative[rank])
    return [(rank, float(relative[rank])) for rank in slow[:_MOST]]
