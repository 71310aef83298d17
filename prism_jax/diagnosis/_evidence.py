"""How strongly a trace, and the steps by themselves, speak for a cause."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .._robust import in_core
from ..data import Job
from ..trace import RankTimes
from ._series import Series, student


# By how much of a step sound jobs show it, by cause.
_USUAL = {"slow-rank": 0.03, "no-overlap": 0.05, "launch-bound": 0.1, "stalls": 0.03, "drift": 0.05}
_DEGREES = 3.0
# A machine that is shared gets slower by itself, so a trend of one series says less.
_OF_TRENDS = 1.0


@dataclasses.dataclass(frozen=True)
class OfRanks:
    """What the traces of ranks show, as shares of a step.

    **Attributes:**

    - `number`: the number of traced ranks. One rank alone cannot be called slow.
    - `rank`: the rank whose own work is longest, and `longer`, by how much.
    - `scatter`: how much the others differ.
    - `exposed`: collectives that could be hidden, of the rank that waits least in them.
    - `hidden`: the share of its collectives that runs under compute.
    - `idle`: the part of the step in which its device does nothing.
    """

    number: int
    rank: int
    longer: float
    scatter: float
    exposed: float
    hidden: float
    idle: float


def of_ranks(times: Sequence[RankTimes], job: Job) -> OfRanks:
    """What the traces show. Ranks are compared with those of their stage in the job's layout if two
    or more of these are traced, and otherwise with all.
    """
    peers = max(job.layout.world_size // job.layout.pp, 1)
    step = float(np.median([np.median(one.step_s) for one in times]))
    own = {one.rank: float(np.median(one.own_s)) / step for one in times}
    lead: dict[int, tuple[float, float]] = {}
    for rank, mine in own.items():
        near = [x for r, x in own.items() if r != rank and r // peers == rank // peers]
        others = near if len(near) > 1 else [x for r, x in own.items() if r != rank] or [mine]
        lead[rank] = (mine - float(np.median(others)), float(np.std(others)))
    rank = max(lead, key=lambda r: lead[r][0])
    least = min(times, key=lambda one: float(np.median(one.communication_s)))
    talks, exposed = (float(np.median(x)) for x in (least.communication_s, least.exposed_s))
    hidden = 1 - exposed / talks if talks > 0 else 1.0
    idle = float(np.median(least.idle_s)) / step
    return OfRanks(len(times), rank, *lead[rank], exposed / step, hidden, idle)


def shares_of_ranks(found: OfRanks) -> dict[str, tuple[float, float]]:
    """The share of a step that a cause would take by these traces, and its error."""
    shares = {"no-overlap": (found.exposed * (1 - found.hidden), 0.0)}
    if found.number > 1:
        shares["slow-rank"] = found.longer, found.scatter
    if found.idle > 0:
        shares["launch-bound"] = found.idle, 0.0
    return shares


def shares_of_series(series: Series) -> dict[str, tuple[float, float]]:
    """The share of a step that slow steps and a trend take, and its error; of short runs none."""
    if not len(series.steps):
        return {}
    above = series.steps / series.level - 1
    slow = np.sort(above[~in_core(above) & (above > 0)])
    lost = float(np.sum(slow[:-1])) / len(above)  # One slow step can have any reason.
    return {"stalls": (lost / (1 + lost), 0.0), "drift": (series.trend, 2 * series.trend_error)}


def odds(cause: str, share: float, error: float) -> float:
    """The density of a share of the step with the cause, any share from 0 to 1 being as likely,
    over that without, where it has a heavy tail.
    """
    scale = float(np.hypot(_USUAL[cause], error))
    degrees = _OF_TRENDS if cause == "drift" else _DEGREES
    return scale / (2 * float(student(max(share, 0.0) / scale, degrees)))
