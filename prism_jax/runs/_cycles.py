"""Simulates runs as cycles between interruptions, many runs in parallel."""

import dataclasses
import math

import numpy as np
from jaxtyping import Float, Int

from ._rates import Hazards, exposed, reached


# Of longer tails, no sample has the mean.
_MOST_POWER = 5
# A rate per second of what does not happen.
_NEVER = 1e-300
PARTS = ("work", "evaluation", "checkpoint", "lost", "down", "waiting", "slow")


@dataclasses.dataclass(frozen=True)
class RunCosts:
    """The costs of a run besides its steps, in seconds (`repair_power` is a number).

    **Attributes:**

    - `interval_s`: the work between two checkpoints.
    - `blocking_s`: for how long a checkpoint blocks the job.
    - `restart_s`: the time from when an interruption is noticed to the first step after it.
    - `background_s`: for how long a checkpoint is then written in the background. An interruption
        before the end of it makes the checkpoint useless, unless it was announced.
    - `repair_s`: the mean time until a node that was replaced can be used as a spare.
    - `evaluation_s`: the time for evaluations in each interval.
    - `repair_power`: how much repairs differ. Each takes an exponential time to this power, scaled
        to the mean (a Weibull law of shape `1 / repair_power`). 0: all take the same time; above
        1, most are short and a few very long.
    """

    interval_s: float
    blocking_s: float
    restart_s: float
    background_s: float = 0.0
    repair_s: float = 0.0
    evaluation_s: float = 0.0
    repair_power: float = 0.0


def check_costs(costs: RunCosts) -> None:
    """Raises a `ValueError` unless the costs are those of a run."""
    for field in dataclasses.fields(costs):
        value = getattr(costs, field.name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"`costs.{field.name}={value}` must be finite and not negative.")
    if costs.repair_power > _MOST_POWER:
        raise ValueError(
            f"`costs.repair_power={costs.repair_power}` must be at most {_MOST_POWER}; give 0 for "
            "repairs of one length."
        )
    if not costs.interval_s > costs.blocking_s:
        raise ValueError(
            f"A checkpoint holds up the job for {costs.blocking_s:g} s, but there are only "
            f"{costs.interval_s:g} s of work between two; give a longer interval."
        )


@dataclasses.dataclass(frozen=True)
class Runs:
    """Simulated runs.

    **Attributes:**

    - `parts`: the seconds of each run by `PARTS`, which add up to its length; `slow` is zero here.
    - `interruptions`: the number of interruptions by cause.
    - `exposed`: the seconds of each run, weighted by the factors of its weeks.
    - `rates`: as in `Hazards`.
    """

    parts: Float[np.ndarray, "runs parts"]
    interruptions: Int[np.ndarray, "runs causes"]
    exposed: Float[np.ndarray, "runs"]
    rates: Float[np.ndarray, "runs causes"]

    @property
    def seconds(self) -> Float[np.ndarray, "runs"]:
        """The length of each run."""
        return self.parts.sum(axis=1)


def run_cycles(
    work: Float[np.ndarray, "runs"],
    slowness: Float[np.ndarray, "runs sets"],
    hazards: Hazards,
    costs: RunCosts,
    rng: np.random.Generator,
) -> Runs:
    """Simulates runs from interruption to interruption.

    A cycle begins with downtime (except for the first), and continues with work and a checkpoint
    after each interval. The next interruption comes after an exponential time (in weighted seconds
    where weeks differ), independently of what the run does, and takes a node or not by its cause.
    It loses the work that is not in a finished checkpoint; an announced one saves all work before.

    In the downtime, the interruption is noticed, then the run waits while more nodes are in repair
    than it has spares, then it restarts. An interruption meanwhile begins the downtime again, but
    what is in repair stays there until it is repaired.

    **Arguments:**

    - `work`: the work of each run, in seconds on GPUs of mean speed.
    - `slowness`: factors on the work, for the sets of GPUs that a run has one after the other.
        After the last set, the run starts again with the first.
    - `hazards`, `costs`: the causes of interruptions, and the costs.
    - `rng`: a generator. The same generator gives the same random numbers to each run and cycle.
    """
    num_runs, num_causes = hazards.rates.shape
    rate = hazards.rates.sum(axis=1)
    chance = np.cumsum(hazards.rates, axis=1) / np.where(rate > 0, rate, 1)[:, None]
    interruptions = np.zeros((num_runs, num_causes), np.int64)
    parts = np.zeros((num_runs, len(PARTS)))
    # When each spare can be used; one place of each run is empty.
    spares = np.zeros((num_runs, (hazards.num_spares or 0) + 1))
    complete = np.zeros(num_runs)  # From when on each run has all its nodes.
    done, clock, unnoticed, down, wait = (np.zeros(num_runs) for _ in range(5))
    sets, empty = np.zeros(num_runs, np.int64), np.zeros(num_runs, np.int64)
    going = np.arange(num_runs)
    evaluated = costs.evaluation_s / costs.interval_s
    while len(going):
        until = rng.exponential(size=num_runs)[going]
        numbers = rng.random(num_runs)[going]
        repair = _repairs(num_runs, costs, rng)
        until = until / np.maximum(rate[going], _NEVER)
        if hazards.weeks is not None:
            weeks = hazards.weeks[going]
            until = reached(exposed(clock[going], weeks) + until, weeks) - clock[going]
        slow = slowness[going, sets[going] % slowness.shape[1]]
        cause = np.minimum((chance[going] < numbers[:, None]).sum(axis=1), num_causes - 1)
        works = until - down[going] - wait[going]
        announced = hazards.announced[cause]
        safe, saving, lost, ends = _cycle(work[going] - done[going], slow, works, announced, costs)
        waited = np.minimum(np.maximum(until - unnoticed[going], 0), wait[going])
        used = np.minimum(until, down[going] + wait[going])
        progress = (safe * slow, safe * slow * evaluated, saving, lost)
        parts[going, :-1] += np.stack((*progress, used - waited, waited), axis=1)
        done[going] += safe
        clock[going] = parts[going].sum(axis=1)

        going, cause = going[~ends], cause[~ends]
        interruptions[going, cause] += 1
        sets[going] += hazards.reallocates[cause]
        unnoticed[going] = hazards.detection_s[cause]
        down[going] = unnoticed[going] + costs.restart_s
        if hazards.num_spares is not None:
            # The run takes the node that comes first; that may be the one that just failed.
            needs = going[hazards.takes_node[cause]]
            spares[needs, empty[needs]] = clock[needs] + repair[needs]
            empty[needs] = spares[needs].argmin(axis=1)
            complete[needs] = np.maximum(complete[needs], spares[needs, empty[needs]])
            wait[going] = np.maximum(complete[going] - clock[going] - unnoticed[going], 0)
    weighted = clock if hazards.weeks is None else exposed(clock, hazards.weeks)
    return Runs(parts, interruptions, weighted, hazards.rates)


def _repairs(number: int, costs: RunCosts, rng: np.random.Generator) -> np.ndarray:
    """The seconds of so many repairs. Those of one length need no random numbers."""
    if not costs.repair_power:
        return np.full(number, float(costs.repair_s))
    scale = costs.repair_s / math.gamma(1 + costs.repair_power)
    return scale * rng.exponential(size=number) ** costs.repair_power


def _cycle(left, slow, until, announced, costs: RunCosts) -> tuple[np.ndarray, ...]:
    """Of runs with the work `left` until they are interrupted: the work that is safe, the seconds
    in checkpoints and lost, and whether they end.
    """
    # Evaluations stretch the intervals; they are as safe, or lost, as the work.
    stretched = slow * (1 + costs.evaluation_s / costs.interval_s)
    between = np.maximum(np.ceil(left / costs.interval_s) - 1, 0)  # The end needs no checkpoint.
    ends = until >= left * stretched + between * costs.blocking_s
    cycle_s = costs.interval_s * stretched + costs.blocking_s
    written = until - np.where(announced, 0, costs.background_s)
    with np.errstate(invalid="ignore"):
        saved = np.floor(np.maximum(written, 0) / cycle_s)
    saved = np.where(ends, between, np.minimum(saved, between))
    beyond = np.where(ends, 0, np.maximum(until, 0) - saved * cycle_s)
    # An announced interruption loses nothing except the unfinished part of a checkpoint.
    kept = np.where(announced, np.minimum(beyond / stretched, costs.interval_s), 0)
    lost = np.where(announced, 0, beyond)
    safe = np.where(ends, left, saved * costs.interval_s + kept)
    return safe, saved * costs.blocking_s + (beyond - lost - kept * stretched), lost, ends
