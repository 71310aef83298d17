"""Should the scheduler of a cluster plan by the mean of its jobs' durations, or by their p95?

    python examples/cluster_study.py

Jobs of three kinds arrive at random times at 160 nodes of eight GPUs. The law of their durations is
that of `prism_jax.training_run`: steps, interruptions, and waits for the repair of a node, because
no job has a spare. The scheduler knows the law and plans by an estimate. It does what schedulers of
clusters do:

- EASY backfill (Lifka 1995, "The ANL/IBM SP scheduling system"). Jobs start in the order of their
  arrival. The first that has to wait gets a reservation: the time when enough nodes are free, by
  the estimates. A later job may start before it if it ends by then, by its estimate, or if the
  reservation leaves enough nodes.
- Deadlines, as with `--deadline` of Slurm's `sbatch`: a waiting job whose estimate is too long to
  end by its deadline is removed. A job that runs is never stopped.

The estimate of a running job is that of all runs that take at least as long as it has already.
SimPy runs the events; times are in days.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import msgspec
import numpy as np
import simpy

import prism_jax as prism


Estimate = Callable[[np.ndarray], float]  # Of sorted days.
NODES = 160
FIGURES = ("completion", "utilisation", "kept", "late", "removed")


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """Jobs that run on as many `nodes` for one of the `days`, sorted and equally likely. `share` is
    their share of all jobs.
    """

    nodes: int
    days: np.ndarray
    share: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A job: when it arrives, how many days it will run, and by when it should end."""

    kind: Kind
    arrival: float
    days: float
    deadline: float = math.inf


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """When a job started, infinite if it was removed, and the earliest start that was reserved for
    it, infinite if it never had to wait as the first of the queue.
    """

    job: Job
    start: float
    reserved: float

    @property
    def end(self) -> float:
        return self.start + self.job.days


def kinds_of_jobs() -> list[Kind]:
    """Llama 3.1 8B on 4, 16 and 64 nodes. Faults are as frequent, and differ as much between nodes
    and weeks, as those of 400 servers (`hardware/failures/infinitehbd.toml`). Repairs are assumed
    to take a day on average, with an exponential law.
    """
    faults = prism.load_failures("infinitehbd")
    faults = msgspec.structs.replace(faults, repair_s=86_400.0, repair_power=1.0)
    kinds = []
    for nodes, steps, share in ((4, 150_000, 0.6), (16, 300_000, 0.3), (64, 450_000, 0.1)):
        size = [f"layout.dp={nodes}", f"num_nodes={nodes}"]
        job = prism.load_job(pathlib.Path(__file__).parent / "job.toml", size)
        law = prism.training_run(
            prism.compile_job(job),
            num_steps=steps,
            key=jax.random.key(0),
            failures=faults,
            num_spares=0,
            num_runs=4_000,
            num_samples=1_024,
        )
        kinds.append(Kind(nodes, law.days, share))
    return kinds


def mean(days: np.ndarray) -> float:
    return float(days.mean())


def quantile(q: float) -> Estimate:
    """The estimate that a share `q` of the runs do not exceed. Raises a `ValueError` unless `q` is
    from 0 to 1.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"`q={q}` must be a share from 0 to 1, such as 0.95.")
    return lambda days: float(days[min(int(q * len(days)), len(days) - 1)])


def expected(job: Job, ran: float, estimate: Estimate) -> float:
    """The estimate of a job's days when it has run for so many of them."""
    days = job.kind.days
    return estimate(days[min(int(np.searchsorted(days, ran)), len(days) - 1) :])


def next_job(
    queue: Sequence[Job], running: Mapping[Job, float], nodes: int, now: float, estimate: Estimate
) -> tuple[Job | None, float]:
    """The job that EASY starts now, if any, and the time that it reserves for the first of the
    queue, infinite if that one starts. `running` has the start of each job that runs.
    """
    free = nodes - sum(job.kind.nodes for job in running)
    head = queue[0]
    if head.kind.nodes <= free:
        return head, math.inf
    reserved, left = now, free
    for end, held in sorted(
        (start + expected(job, now - start, estimate), job.kind.nodes)
        for job, start in running.items()
    ):
        if left >= head.kind.nodes:
            break
        reserved, left = end, left + held
    spare = left - head.kind.nodes
    for job in queue[1:]:
        ends = now + expected(job, 0.0, estimate)
        if job.kind.nodes <= free and (ends <= reserved or job.kind.nodes <= spare):
            return job, reserved
    return None, reserved


def simulate(jobs: Sequence[Job], nodes: int, estimate: Estimate) -> list[Outcome]:
    """What becomes of jobs on so many nodes. Raises a `ValueError` for a job with more nodes."""
    if any(job.kind.nodes > nodes for job in jobs):
        raise ValueError(f"A job has more than the {nodes} nodes of the cluster; give it fewer.")
    env = simpy.Environment()
    queue: dict[Job, simpy.Event] = {}  # What each job waits for.
    running: dict[Job, float] = {}
    starts: dict[Job, float] = {}
    reserved: dict[Job, float] = {}

    def live(job):
        yield env.timeout(job.arrival)
        queue[job] = start = env.event()
        plan()
        yield start
        yield env.timeout(job.days)
        del running[job]
        plan()

    def plan():
        for job in [*queue]:
            if env.now + expected(job, 0.0, estimate) > job.deadline:
                del queue[job]
        while queue:
            waiting = [*queue]
            job, promise = next_job(waiting, running, nodes, env.now, estimate)
            reserved[waiting[0]] = min(promise, reserved.get(waiting[0], math.inf))
            if job is None:
                return
            running[job] = starts[job] = env.now
            queue.pop(job).succeed()

    for job in jobs:
        env.process(live(job))
    env.run()
    never = math.inf
    return [Outcome(job, starts.get(job, never), reserved.get(job, never)) for job in jobs]


def draw_jobs(
    kinds: Sequence[Kind],
    nodes: int,
    seed: int,
    *,
    number: int = 400,
    load: float = 0.8,
    slack: tuple[float, float] | None = None,
) -> list[Job]:
    """Jobs that arrive as a Poisson process and ask for a share `load` of all nodes' time. The time
    from arrival to deadline is the mean duration times a number that is uniform in `slack`; `None`
    for no deadlines.
    """
    rng = np.random.default_rng(seed)
    shares = np.array([kind.share for kind in kinds]) / sum(kind.share for kind in kinds)
    asked = sum(s * k.nodes * mean(k.days) for s, k in zip(shares, kinds, strict=True))
    arrivals = rng.exponential(asked / (load * nodes), number).cumsum().tolist()
    drawn = [kinds[i] for i in rng.choice(len(kinds), number, p=shares)]
    days = [float(rng.choice(kind.days)) for kind in drawn]
    rooms = np.full(number, math.inf) if slack is None else rng.uniform(*slack, number)
    deadlines = [
        arrival + room * mean(kind.days)
        for arrival, room, kind in zip(arrivals, rooms.tolist(), drawn, strict=True)
    ]
    return [Job(*one) for one in zip(drawn, arrivals, days, deadlines, strict=True)]


def figures(outcomes: Sequence[Outcome], nodes: int) -> list[float]:
    """The `FIGURES`: the mean days from arrival to end of jobs that ran; the share of all nodes'
    time, from the first arrival to the last end, in which they run a job; the share of reservations
    that were kept; and the shares of all jobs that ended late and that were removed.
    """
    ran = [one for one in outcomes if one.start < math.inf]
    held = [one.start <= one.reserved + 1e-9 for one in ran if one.reserved < math.inf]
    begin = min(one.job.arrival for one in outcomes)
    span = max((one.end for one in ran), default=begin) - begin
    busy = sum(one.job.kind.nodes * one.job.days for one in ran)
    return [
        sum(one.end - one.job.arrival for one in ran) / max(len(ran), 1),
        busy / (nodes * span) if span else 0.0,
        sum(held) / len(held) if held else 1.0,
        sum(one.end > one.job.deadline for one in ran) / len(outcomes),
        1 - len(ran) / len(outcomes),
    ]


def study(
    kinds: Sequence[Kind], nodes: int, estimate: Estimate, *, num_seeds: int = 40, **options
) -> np.ndarray:
    """The `FIGURES` for each seed, (seeds, figures), with the options of `draw_jobs`."""
    drawn = (draw_jobs(kinds, nodes, seed, **options) for seed in range(num_seeds))
    return np.array([figures(simulate(jobs, nodes, estimate), nodes) for jobs in drawn])


def with_error(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over seeds and its standard error."""
    return rows.mean(axis=0), rows.std(axis=0, ddof=1) / math.sqrt(len(rows))


def main() -> None:
    """Prints both estimates, and their difference for the same jobs."""
    kinds, p95 = kinds_of_jobs(), quantile(0.95)
    for kind in kinds:
        print(f"{kind.nodes:3} nodes: mean {mean(kind.days):.2f}, p95 {p95(kind.days):.2f} days")
    for title, slack in (("no deadlines", None), ("1.2 to 3 times the mean", (1.2, 3.0))):
        rows = {"mean": study(kinds, NODES, mean, slack=slack)}
        rows["p95"] = study(kinds, NODES, p95, slack=slack)
        rows["p95 - mean"] = rows["p95"] - rows["mean"]
        print(f"\n{title:<24}" + "".join(f"{name:>17}" for name in FIGURES))
        for name, found in rows.items():
            values = zip(*with_error(found * [1, 100, 100, 100, 100]), strict=True)
            print(f"{name:<24}" + "".join(f"{f'{v:.2f} +- {e:.2f}':>17}" for v, e in values))
    print("\ncompletion in days, the others in %")


if __name__ == "__main__":
    main()
