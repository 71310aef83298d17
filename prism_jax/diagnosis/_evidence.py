"""What measured steps and traces of ranks show, and how strongly this speaks for a cause."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln

from .._estimate import in_core, typical
from ..data import Job
from ..trace import RankWhere


FEWEST = 12  # Steps whose spread and trend are looked at.
# By how much of a step sound jobs show it, by cause.
_USUAL = {"slow-rank": 0.03, "no-overlap": 0.05, "launch-bound": 0.1, "stalls": 0.03, "drift": 0.05}
_USUAL |= {"input": 0.03}
_DEGREES = 3.0
# A machine that is shared gets slower by itself, so a trend of one series says less.
_OF_TRENDS = 1.0


@dataclasses.dataclass(frozen=True)
class StepSeries:
    """**Attributes:**

    - `number`, `level`: the number of all steps, and their median in seconds.
    - `steps`: the steps of runs of `FEWEST` or more, without the trend, in seconds. Of shorter runs
        only the median is used.
    - `trend`, `trend_error`: the logarithm of the last of these steps over the first, and its
        standard error, in which steps that resemble the next count less.
    """

    number: int
    level: float
    steps: Float[np.ndarray, " steps"]
    trend: float = 0.0
    trend_error: float = 0.0


def series_of(runs: Sequence[Float[np.ndarray, "_"]]) -> StepSeries:
    """The figures of the steps of some runs, each in the order of its steps."""
    level = float(np.median([np.median(run) for run in runs]))
    number, long = sum(map(len, runs)), [run for run in runs if len(run) >= FEWEST]
    if not long:
        return StepSeries(number, level, np.zeros(0))
    slopes, errors, flat = [], [], []
    for run in long:
        logs = np.log(run / np.median(run))
        place = np.linspace(-0.5, 0.5, len(run))
        first, last = logs[place < -1 / 6], logs[place > 1 / 6]
        slope = 1.5 * float(np.median(last) - np.median(first))
        detrended = logs - slope * place
        core = np.where(in_core(detrended), detrended - np.median(detrended), 0)
        alike = np.clip(np.sum(core[1:] * core[:-1]) / max(np.sum(core**2), 1e-300), 0, 0.95)
        spread = 1.25 * np.sqrt(6 / len(run) * (1 + alike) / (1 - alike))
        slopes.append(slope)
        errors.append(1.5 * spread * float(typical(detrended, (0,))[1][0]))
        flat.append(level * np.exp(detrended))
    error = float(np.hypot.reduce(errors)) / len(long)
    return StepSeries(number, level, np.concatenate(flat), float(np.mean(slopes)), error)


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
    - `launches`, `input`: the parts of this in which the host launched, and waited for its input.
    """

    number: int
    rank: int
    longer: float
    scatter: float
    exposed: float
    hidden: float
    idle: float
    launches: float = 0.0
    input: float = 0.0

    def __str__(self) -> str:
        parts = []
        if self.number > 1:
            longer = f"rank {self.rank} has most own work, by {self.longer:.1%} of a step"
            parts.append(f"{longer}; others differ by {self.scatter:.1%}")
        if self.exposed > 0:
            parts.append(f"{self.hidden:.0%} of collectives run under compute")
        if self.idle > 0:
            late = f"{self.launches:.0%} for launches and {self.input:.0%} for input"
            parts.append(f"idle for {self.idle:.0%} of a step, {late}")
        return "; ".join(parts) or "nothing to compare"


def of_ranks(ranks: Sequence[RankWhere], job: Job) -> OfRanks:
    """What the traces show. Ranks are compared with those of their stage in the job's layout if two
    or more of these are traced, and otherwise with all.
    """
    peers = max(job.layout.world_size // job.layout.pp, 1)
    step = float(np.median([where.step_time_s for where in ranks]))
    own_shares = {where.rank: where.own_s / step for where in ranks}
    lead: dict[int, tuple[float, float]] = {}
    for rank, share in own_shares.items():
        neighbours = [x for r, x in own_shares.items() if r != rank and r // peers == rank // peers]
        compared = (
            neighbours
            if len(neighbours) > 1
            else [x for r, x in own_shares.items() if r != rank] or [share]
        )
        lead[rank] = (share - float(np.median(compared)), float(np.std(compared)))
    rank = max(lead, key=lambda r: lead[r][0])
    least = min(ranks, key=lambda where: where.hideable_s[0])
    talks, exposed = least.hideable_s
    hidden = 1 - exposed / talks if talks > 0 else 1.0
    causes = {part.cause: part.seconds / step for part in least.idle}
    idle = least.split.idle_s / step if least.split and causes else 0.0
    late = causes.get("launches", 0.0), causes.get("input", 0.0)
    return OfRanks(len(ranks), rank, *lead[rank], exposed / step, hidden, idle, *late)


def shares_of_ranks(seen: OfRanks) -> dict[str, tuple[float, float]]:
    """The share of a step that a cause would take by these traces, and its error."""
    shares = {"no-overlap": (seen.exposed * (1 - seen.hidden), 0.0)}
    if seen.number > 1:
        shares["slow-rank"] = seen.longer, seen.scatter
    if seen.idle > 0:
        shares |= {"launch-bound": (seen.launches, 0.0), "input": (seen.input, 0.0)}
    return shares


def shares_of_series(series: StepSeries) -> dict[str, tuple[float, float]]:
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


def log_shapes(steps: Float[np.ndarray, "draws steps"]) -> Float[np.ndarray, "draws 2"]:
    """Of each row, the logarithms of the spread of the core, and of what slow outliers add to the
    mean over this spread.
    """
    relative = steps / np.median(steps, axis=1, keepdims=True) - 1
    limit = 5 * np.maximum(typical(relative, (1,))[1], 1e-6)
    core = np.abs(relative) <= limit
    spread = np.sqrt(np.sum(relative**2 * core, axis=1) / core.sum(axis=1)) + 1e-6
    slow = np.mean(relative * (relative > limit), axis=1)
    return np.log(np.stack([spread, slow / spread + 0.0025], axis=1))


def student(z, degrees: float):
    """The density of Student's law, or of the normal law for infinite degrees."""
    return np.exp(log_student(z, degrees))


def log_student(z, degrees: float):
    """Its logarithm, also where the density is too small for a number."""
    if np.isinf(degrees):
        return -(z**2) / 2 - np.log(2 * np.pi) / 2
    scale = gammaln((degrees + 1) / 2) - gammaln(degrees / 2) - np.log(np.pi * degrees) / 2
    return scale - (degrees + 1) / 2 * np.log1p(z**2 / degrees)
