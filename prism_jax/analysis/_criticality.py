"""Where the critical path runs: how likely ops, stages and ranks lie on it, and what is exposed."""

import dataclasses
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from .._misc import counted
from .._progress import progress_bar
from .._summary import Column, Shown, Table
from ..engine import critical_paths, simulated_steps, vector_rule_notes
from ..program import Program
from ._exposed import communication_shares, exposed_of


# At most this many critical paths are followed.
_MOST_STEPS = 10_000


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
    - `notes`: a warning where the vector rule of replicas, which all figures follow, is too low.
    """

    ops: dict[str, np.ndarray]
    stages: dict[str, np.ndarray]
    ranks: dict[str, np.ndarray]
    exposed_communication: Float[np.ndarray, " steps"]
    exposed_data_parallel: Float[np.ndarray, " steps"]
    num_steps: int
    num_replicas_seen: float
    notes: tuple[str, ...] = ()

    def table(self, of: str = "ops") -> Any:
        """A polars frame of the `ops`, `stages` or `ranks`, the most probable first."""
        import polars as pl

        if of not in ("ops", "stages", "ranks"):
            raise ValueError(f"`of={of!r}` must be 'ops', 'stages' or 'ranks'.")
        frame = pl.DataFrame(getattr(self, of))
        seconds = [name for name in frame.columns if name.endswith("_s")]
        units = {name: f"{name.removesuffix('_s')} [s]" for name in seconds}
        return frame.rename(units).sort("probability", descending=True, maintain_order=True)

    def summary(self, of: Literal["ranks", "stages"] = "ranks") -> Table:
        """A row for each pipeline rank or stage."""
        title = (
            f"Criticality: {counted(self.num_steps, 'step')}, decided by "
            f"{counted(round(self.num_replicas_seen), 'replica')}; exposed communication "
            f"{100 * self.exposed_communication.mean():.2f} % of a step"
        )
        import polars as pl

        columns = (
            Column(of.removesuffix("s")),
            Column("on the critical path", "probability", "", "%", "standard_error", 100),
            Column("share of the step", "share", ".2f", "%", scale=100),
        )
        return Table(columns, pl.DataFrame(getattr(self, of)).to_dicts(), title, self.notes)


def criticality(
    program: Program,
    *,
    num_samples: int,
    key: PRNGKeyArray,
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
    ops = program.ops
    compute = ~program.ops.is_send_recv
    labels = {"stages": ops.stage.value, "ranks": ops.rank.value}
    total = {name: np.zeros(program.num_ops) for name in ("probability", "latency_s", "slack_s")}
    groups = {
        name: {"probability": np.zeros(of.max() + 1), "share": np.zeros(of.max() + 1)}
        for name, of in labels.items()
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
            taken = on_path * (paths.factor / steps)
            for name, of in labels.items():
                mine = groups[name]
                mine["probability"] += _any(critical[compute], of[compute]).sum(axis=1)
                mine["share"] += np.bincount(of[compute], taken[compute].sum(axis=1))
            reduction = paths.reductions[paths.sink, np.arange(len(steps))]
            before_tail = (shares["ops"] @ on_path + reduction) * paths.factor
            ended = (on_path.sum(axis=0) + reduction) * paths.factor
            exposed.append((before_tail + shares["tail"] * np.maximum(steps - ended, 0)) / steps)
            samples.append(paths.sample)
            advance(len(steps))
    number = len(chosen)
    _, times = np.unique(np.concatenate(samples), return_counts=True)
    seen = number**2 / float(np.sum(times**2))
    ops_rows = {x: getattr(ops, x).value for x in ("phase", "stage", "microbatch", "rank")}
    found = {name: x / number for name, x in total.items()}
    return Criticality(
        ops={**ops_rows, **_with_error(found, seen)},
        stages=_rows("stage", groups["stages"], number, seen),
        ranks=_rows("rank", groups["ranks"], number, seen),
        exposed_communication=np.concatenate(exposed),
        exposed_data_parallel=(exposed_of(simulated) / simulated.steps)[chosen],
        num_steps=number,
        num_replicas_seen=seen,
        notes=vector_rule_notes(simulated.run),
    )


def _steps_between(
    steps: Float[np.ndarray, " steps"], low: float, high: float
) -> Int[np.ndarray, " chosen"]:
    """The steps between two quantiles; if there are too many, an evenly spaced subset of them."""
    order = np.argsort(steps, kind="stable")
    chosen = order[int(np.floor(low * len(order))) : int(np.ceil(high * len(order)))]
    return np.sort(chosen[:: max(-(-len(chosen) // _MOST_STEPS), 1)])


def _any(critical: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Whether any op of each label is critical: `(labels, steps)`."""
    found = np.zeros((of.max() + 1, critical.shape[1]), bool)
    np.logical_or.at(found, of, critical)
    return found


def _rows(
    label: str, total: dict[str, np.ndarray], number: int, seen: float
) -> dict[str, np.ndarray]:
    means = _with_error({name: x / number for name, x in total.items()}, seen)
    return {label: np.arange(len(means["probability"])), **means}


def _with_error(found: dict[str, np.ndarray], seen: float) -> dict[str, np.ndarray]:
    """Adds the standard error of the probability, as if one more of each outcome had been seen."""
    probability = found["probability"]
    smoothed = (probability * seen + 1) / (seen + 2)
    error = np.sqrt(smoothed * (1 - smoothed) / seen)
    rest = {name: x for name, x in found.items() if name != "probability"}
    return {"probability": probability, "standard_error": error, **rest}
