"""Where the critical path runs: how likely ops, stages and ranks lie on it, and what is exposed."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, Int

from .._installed import needed
from .._misc import plural
from .._progress import progress_bar
from .._summary import Column, Shown, Table, picked_attributes
from ..cluster import COLLECTIVES
from ..engine import (
    SimulatedSteps,
    critical_paths,
    exposed_reductions,
    prepare,
    simulated_steps,
    steps_of_run,
)
from ..program import Overlaps, Program


# At most this many critical paths are followed.
_MOST_STEPS = 10_000
# The most steps that are simulated for what is exposed, which is enough for a share of a step.
_MOST_EXPOSED = 2**13


@dataclasses.dataclass(frozen=True, repr=False)
class Criticality(Shown):
    """The result of `criticality`. Times are in seconds.

    **Attributes:**

    - `ops`: for each op of a replica: its `phase`, `stage`, `microbatch` and `rank`; the
        `probability` that it is on the critical path, with its `standard_error`; its mean
        `latency_s`; and its mean `slack_s`, by which it could take longer before the step does.
        Latency and slack are before the factor of the step.
    - `stages`, `ranks`: for each stage or rank: the `probability` that any of its ops is on the
        critical path, with its `standard_error`; and the `share` of the step that its ops on the
        critical path take.
    - `exposed_communication`: `(steps,)`, the share of each step that is communication on the
        critical path: between stages, inside blocks (on average, given the block), of gradients and
        parameters.
    - `exposed_data_parallel`: `(steps,)`, the share of each step that is spent waiting for
        data-parallel communication: for the reduction of gradients after the last backward, and for
        parameters after all ranks have met.
    - `num_steps`: the number of steps whose critical path was followed.
    - `num_replicas_seen`: the effective number of replica samples that decide these steps, from
        which standard errors come.
    """

    ops: dict[str, np.ndarray]
    stages: dict[str, np.ndarray]
    ranks: dict[str, np.ndarray]
    exposed_communication: Float[np.ndarray, " steps"]
    exposed_data_parallel: Float[np.ndarray, " steps"]
    num_steps: int
    num_replicas_seen: float

    def table(self, of: str = "ops") -> Any:
        """A polars frame of the `ops`, `stages` or `ranks`, the most probable first."""
        pl = needed("polars")
        if of not in ("ops", "stages", "ranks"):
            raise ValueError(f"`of={of!r}` must be 'ops', 'stages' or 'ranks'.")
        frame = pl.DataFrame(getattr(self, of))
        seconds = [name for name in frame.columns if name.endswith("_s")]
        units = {name: f"{name.removesuffix('_s')} [s]" for name in seconds}
        return frame.rename(units).sort("probability", descending=True, maintain_order=True)

    def headline(self) -> str:
        exposed = {
            "": self.exposed_communication,
            " of data parallelism": self.exposed_data_parallel,
        }
        lines = [
            f"exposed communication{kind}, of a step: "
            + ", ".join(f"{100 * x:.2f} % ({name})" for name, x in levels_of(shares).items())
            for kind, shares in exposed.items()
        ]
        seen = plural(round(self.num_replicas_seen), "replica")
        return "\n".join([*lines, f"{plural(self.num_steps, 'step')}, decided by {seen}"])

    def to_json(self) -> dict[str, Any]:
        """What is exposed, as its mean and some percentiles, and of how many steps it is."""
        exposed = {
            name: levels_of(getattr(self, name))
            for name in ("exposed_communication", "exposed_data_parallel")
        }
        return exposed | picked_attributes(self, "num_steps", "num_replicas_seen")

    def summary(self, of: Literal["ranks", "stages"] = "ranks") -> Table:
        """A row for each pipeline rank or stage."""
        title = (
            f"Criticality: {self.headline().splitlines()[-1]}; exposed communication "
            f"{100 * self.exposed_communication.mean():.2f} % of a step"
        )
        held = getattr(self, of)
        rows = [
            dict(zip(held, row, strict=True))
            for row in zip(*(column.tolist() for column in held.values()), strict=True)
        ]
        columns = (
            Column(of.removesuffix("s")),
            Column("on the critical path", "probability", "", "%", "standard_error", 100),
            Column("share of the step", "share", ".2f", "%", scale=100),
        )
        return Table(columns, rows, title)


def levels_of(
    shares: Float[np.ndarray, " steps"], levels: Iterable[int] = (5, 50, 95)
) -> dict[str, float]:
    """The mean and some percentiles, by name."""
    percentiles = {f"p{level}": float(np.quantile(shares, level / 100)) for level in levels}
    return {"mean": float(np.mean(shares)), **percentiles}


def criticality(
    program: Program,
    *,
    num_samples: int,
    key: "jax.Array",
    band: tuple[float, float] = (0.0, 1.0),
    progress: bool = False,
) -> Criticality:
    """Follows the critical paths of simulated steps, either of all or of those in a band of
    quantiles.

    With data-parallel replicas, the path is that of the replica that the step waits for. The
    probability that an op is on it is the derivative of the mean step time with respect to the op's
    latency.

    **Arguments:**

    - `program`: the step.
    - `num_samples`: how many steps to simulate. Of those in the band, the paths of up to 10,000 are
        followed.
    - `key`: a `jax.random` key.
    - `band`: two quantiles, from 0 to 1, between which the time of a step must lie: `(0.94, 0.96)`
        for the steps around p95.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`Criticality`][].

    **Raises:**

    `ValueError` if `band` is not two increasing quantiles between 0 and 1.
    """
    if len(band) != 2 or not 0 <= band[0] < band[1] <= 1:
        raise ValueError(f"The band {band} must be two rising quantiles between 0 and 1.")
    simulated = simulated_steps(program, num_samples=num_samples, key=key)
    chosen = _steps_between(simulated.steps, *band)
    compute, labels = ~program.ops.is_send_recv, op_labels(program)
    total = {name: np.zeros(program.num_ops) for name in ("probability", "latency_s", "slack_s")}
    groups = {name: labels[name][compute] for name in ("stage", "rank")}
    of_groups = {
        name: {column: np.zeros(labels[name].max() + 1) for column in ("probability", "share")}
        for name in groups
    }
    shares = communication_shares(program)
    exposed, samples = [], []
    with progress_bar(len(chosen), progress, "critical paths", "step") as advance:
        for paths in critical_paths(simulated, chosen):
            critical, latency = np.asarray(paths.critical), np.asarray(paths.latency, np.float64)
            total["probability"] += critical.sum(axis=1)
            total["latency_s"] += latency.sum(axis=1)
            total["slack_s"] += np.asarray(paths.slack, np.float64).sum(axis=1)
            on_path = np.where(critical, latency, 0)
            steps = simulated.steps[paths.step]
            on_compute = critical[compute]
            taken = (on_path * (paths.factor / steps))[compute].sum(axis=1)
            for name, group in groups.items():
                places = range(len(of_groups[name]["share"]))
                hits = [on_compute[group == place].any(axis=0).sum() for place in places]
                of_groups[name]["probability"] += hits
                of_groups[name]["share"] += np.bincount(group, taken, len(places))
            reduction = paths.reductions[paths.sink, np.arange(len(steps))]
            before_tail = (shares["ops"] @ on_path + reduction) * paths.factor
            ended = (on_path.sum(axis=0) + reduction) * paths.factor
            exposed.append((before_tail + shares["tail"] * np.maximum(steps - ended, 0)) / steps)
            samples.append(paths.sample)
            advance(len(steps))
    number = len(chosen)
    _, times = np.unique(np.concatenate(samples), return_counts=True)
    seen = number**2 / float(np.sum(times**2))
    stages, ranks = (
        {name: np.arange(len(totals["share"])), **_means(totals, number, seen)}
        for name, totals in of_groups.items()
    )
    ops = {**labels, **_means(total, number, seen)}
    waited = (exposed_of(simulated) / simulated.steps)[chosen]
    return Criticality(ops, stages, ranks, np.concatenate(exposed), waited, number, seen)


def op_labels(program: Program) -> dict[str, np.ndarray]:
    """For each op of a replica: its phase, stage, microbatch and rank."""
    names = ("phase", "stage", "microbatch", "rank")
    return {name: np.asarray(getattr(program.ops, name)) for name in names}


def _steps_between(
    steps: Float[np.ndarray, " steps"], low: float, high: float
) -> Int[np.ndarray, " chosen"]:
    """The steps between two quantiles; if there are too many, an evenly spaced subset of them."""
    order = np.argsort(steps, kind="stable")
    chosen = order[int(np.floor(low * len(order))) : int(np.ceil(high * len(order)))]
    return np.sort(chosen[:: max(-(-len(chosen) // _MOST_STEPS), 1)])


def _means(total: dict[str, np.ndarray], number: int, seen: float) -> dict[str, np.ndarray]:
    """The means over so many steps; and the standard error of the probability, as if one more of
    each outcome had been seen.
    """
    probability, *means = (x / number for x in total.values())
    smoothed = (probability * seen + 1) / (seen + 2)
    error = np.sqrt(smoothed * (1 - smoothed) / seen)
    names = ("probability", "standard_error", *[*total][1:])
    return dict(zip(names, (probability, error, *means), strict=True))


def exposed_data_parallel(
    program: Program, *, num_samples: int = _MOST_EXPOSED, key: "jax.Array"
) -> Float[np.ndarray, " steps"]:
    """How long steps wait for data-parallel communication, in seconds: from the end of the last
    backward to the end of the last reduction of gradients, and in the tail for parameters.

    **Arguments:**

    - `program`: the step.
    - `num_samples`: how many steps; no more than 8,192 are simulated.
    - `key`: a `jax.random` key.

    **Returns:**

    The exposed seconds of each step. Of the tail, the mean share of communication counts.
    """
    number = min(num_samples, _MOST_EXPOSED)
    if (program.sinks.reduction < 0).all() and not communication_shares(program)["tail"]:
        return np.zeros(number)
    # Far tails do not matter here, and plain sampling needs no pilot of its own.
    return exposed_of(steps_of_run(prepare(program, key), number, law_steps=num_samples))


def exposed_of(simulated: SimulatedSteps) -> Float[np.ndarray, " steps"]:
    """`exposed_data_parallel`, from steps that are already simulated."""
    waited, ended = exposed_reductions(simulated)
    in_tail = communication_shares(simulated.run.program)["tail"]
    return waited + in_tail * np.maximum(simulated.steps - ended, 0)


def communication_shares(program: Program) -> dict[str, Any]:
    """The share of communication in the mean latency of each op, and in the tail."""
    table, blocks = program.latencies, program.blocks
    mean = np.asarray(table.mean, np.float64)
    collective = np.array([kind in COLLECTIVES for kind in table.kinds])[np.array(table.kind)]
    direct: Any = blocks.direct
    durations = exposed = np.zeros(len(direct))
    if blocks.segments is not None:
        counts: tuple[Any, ...] = (
            blocks.segments,
            blocks.class_collectives,
            blocks.class_segments,
        )
        runs, exposed = counts[0] @ mean, counts[1] @ mean
        durations = counts[2] @ runs + exposed
        # A block that lies within another has no block within it.
        durations, exposed = _overlapped(blocks.branches, durations, exposed, runs, 0 * runs, mean)
        if (waits := blocks.waits) is not None:
            for within, classes in zip(waits.within, waits.classes, strict=True):
                durations, exposed = (x + classes * x[within] for x in (durations, exposed))
        inner = durations, exposed
        durations, exposed = _overlapped(blocks.outer_branches, *inner, *inner, mean)
    single = direct >= 0
    durations = np.where(single, mean[direct], durations)
    exposed = np.where(single, (mean * collective)[direct], exposed)
    share = exposed / np.where(durations > 0, durations, 1)
    of_ops = share[program.rows.class_[program.ops.row]]
    return {"ops": of_ops, "tail": share[program.tail] if program.tail >= 0 else 0.0}


def _overlapped(
    branches: Overlaps | None, durations, exposed, whole, exposed_within, mean
) -> tuple[np.ndarray, np.ndarray]:
    """How long classes with their branches of constant kernels take, and for how much of this
    nothing computes.
    """
    if branches is None:
        return durations, exposed
    compute, inner = branches.compute @ whole, branches.compute @ exposed_within
    longest = (branches.communication @ mean).max(axis=1, initial=0)
    alpha, beta = np.array(branches.slowdowns).T
    ends = np.maximum(longest + beta * compute, compute + alpha * longest)
    left = ends - (compute - inner)
    return durations + branches.classes @ ends, exposed + branches.classes @ left
