"""What-if scenarios: how the law of the step time would change."""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._estimate import Estimate
from .._installed import needed
from .._misc import check_type, plural, unknown_name
from .._summary import Column, Shown, Table
from ..engine import SimulatedSteps, check_program, simulated_steps
from ..law import QUANTILES
from ..program import Program
from ._check import check_num_steps
from ._jackknife import Jackknifed, combined, jackknifed, withheld
from ._knobs import adjusted, turned
from ._objectives import Mean, Quantile, Std


FIGURES = {"mean": Mean(), "std": Std()} | {name: Quantile(q) for name, q in QUANTILES.items()}
# With fewer steps, there are no more than a few dozen beyond p99.
_P99 = 4800


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A changed step.

    **Attributes:**

    - `program`: the changed step.
    - `replicas`: how many of the data-parallel replicas are changed; `None` for all.
    """

    program: Program
    replicas: int | None = None

    def __post_init__(self) -> None:
        check_type(self.program, Program, "program of a scenario", "use `compile_job` to get one")
        if self.replicas is not None and _whole(self.replicas) < 1:
            raise ValueError(
                f"{self.replicas} replicas were given; a change must be in at least 1 replica."
            )


def _whole(number) -> int:
    """A whole number, or -1 for anything else."""
    try:
        return -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return -1


@dataclasses.dataclass(frozen=True, repr=False)
class WhatIf(Shown):
    """The result of `what_if`, in seconds.

    **Attributes:**

    - `before`: the `mean`, `std`, `p5`, `p50`, `p95` and, if there are enough steps, `p99` of the
        unchanged step time.
    - `changes`: for each scenario, the change of each of these figures.
    - `num_samples`: how many steps were simulated.
    - `notes`: as in [`Sensitivity`][].
    """

    before: dict[str, Estimate]
    changes: dict[str, dict[str, Estimate]]
    num_samples: int
    notes: tuple[str, ...] = ()

    def table(self) -> Any:
        """A polars frame with a row for each scenario and figure, with 95 % intervals."""
        pl = needed("polars")
        rows = []
        for scenario, figures in self.changes.items():
            for name, change in figures.items():
                before, (low, high) = self.before[name].value, change.interval()
                row = {"scenario": scenario, "figure": name, "before [s]": before}
                row |= {"change [s]": change.value, "low [s]": low, "high [s]": high}
                rows.append({**row, "change [%]": 100 * change.value / before})
        return pl.DataFrame(rows)

    def summary(self) -> Table:
        rows = [
            {"scenario": scenario, "figure": name, "before": self.before[name], "change": change}
            for scenario, changes in self.changes.items()
            for name, change in changes.items()
        ]
        columns = (
            "scenario",
            "figure",
            Column("before", unit="s"),
            Column("change", unit="s"),
            Column("95 % interval", lambda row: row["change"].interval(), unit="s"),
        )
        title = f"Changes of the step time by scenario ({plural(self.num_samples, 'step')})"
        return Table(columns, rows, title, self.notes)


def what_if(
    program: Program,
    scenarios: Mapping[str, Scenario],
    *,
    num_samples: int,
    key: "jax.Array",
    progress: bool = False,
) -> WhatIf:
    """Compares the law of the step time with its law in each of some scenarios, with common random
    numbers.

    **Arguments:**

    - `program`: the unchanged step.
    - `scenarios`: a [`Scenario`][] for each name: from [`slow_rank`][], [`scale_kernel`][], or made
        from any other program.
    - `num_samples`: how many steps of each to simulate.
    - `key`: a `jax.random` key.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`WhatIf`][].

    **Raises:**

    `ValueError` for a value that is not a `Scenario`, or for a scenario in only some of the
    replicas whose program has another graph or another number of replicas.
    """
    check_program(program, key)
    example = 'give such as `{"faster gemm": scale_kernel(program, "gemm", 0.9)}`'
    check_type(scenarios, Mapping, "mapping of scenarios by name", example)
    for name, scenario in scenarios.items():
        _check_scenario(program, name, scenario)

    options: dict[str, Any] = {"num_samples": check_num_steps(num_samples), "key": key}
    options["progress"] = progress
    base = simulated_steps(_with_groups(program, scenarios), **options)
    figures = {n: value for n, value in FIGURES.items() if num_samples >= _P99 or n != "p99"}

    before, changes = jackknifed(base, [*figures.values()]), {}
    for name, scenario in scenarios.items():
        after = jackknifed(_simulated(scenario, base, options), [*figures.values()])
        changes[name] = combined(np.subtract, after, before)
    notes: tuple[str, ...] = ()
    by_changes = {f" by {name}": change for name, change in changes.items()}
    for name, change in {"": before, **by_changes}.items():
        for figure, rests_on in zip(figures, change.support.tolist(), strict=True):
            notes += withheld(f"The change of {figure}{name}" if name else figure, rests_on)

    def named(change: Jackknifed) -> dict[str, Estimate]:
        return dict(zip(figures, change.estimates(), strict=True))

    by_scenario = {name: named(change) for name, change in changes.items()}
    return WhatIf(named(before), by_scenario, len(base.steps), notes)


def _with_groups(program: Program, scenarios: Mapping[str, Scenario]) -> Program:
    """The program with the groups of ops of the first scenario that changes some, at factors of
    one: both then run the same compiled code.
    """
    for scenario in scenarios.values():
        groups = scenario.program.adjustment
        if program.adjustment is None and groups and _same_graph(program, scenario.program):
            factors, rest = eqx.partition(groups, eqx.is_inexact_array)
            ones = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype)), factors)
            return dataclasses.replace(program, adjustment=eqx.combine(ones, rest))
    return program


def _simulated(scenario: Scenario, base: SimulatedSteps, options: dict[str, Any]) -> SimulatedSteps:
    """Steps of a scenario."""
    if scenario.replicas is not None and not _everywhere(scenario):
        unlike = (scenario.program, scenario.replicas)
        return simulated_steps(base.run.program, like=base, unlike=unlike, **options)
    # Another graph has other leading axes than the unchanged step.
    like = base if _same_graph(base.run.program, scenario.program) else None
    return simulated_steps(scenario.program, like=like, **options)


def _everywhere(scenario: Scenario) -> bool:
    """Whether the change is in all replicas."""
    return scenario.replicas is None or scenario.replicas >= scenario.program.num_replicas


def _check_scenario(program: Program, name: str, scenario: Scenario) -> None:
    if not isinstance(scenario, Scenario):
        raise ValueError(
            f"`{name}` is of type `{type(scenario).__name__}`; give a `Scenario`, as `slow_rank` "
            "makes it."
        )
    if _everywhere(scenario):
        return
    same = _same_graph(program, scenario.program)
    if not same or program.num_replicas != scenario.program.num_replicas:
        raise ValueError(
            f"`{name}` is in {plural(scenario.replicas or 1, 'replica')} but of another graph or "
            "size; only changes of latencies can be in some of the replicas."
        )


def _same_graph(program: Program, changed: Program) -> bool:
    return program.levels == changed.levels and program.strata == changed.strata


def slow_rank(program: Program, rank: int, factor: float, *, replicas: int | None = 1) -> Scenario:
    """A scenario in which the compute of one pipeline rank takes longer: all GPUs of its tensor-
    and context-parallel group are slow, or one GPU is slow and the others wait for it.

    **Arguments:**

    - `program`: the unchanged step.
    - `rank`: the pipeline rank.
    - `factor`: the factor on the latency of its compute.
    - `replicas`: in how many replicas the rank is slow; `None` for all. A hot node of 8 GPUs is one
        rank of `8 / group_size` replicas, or of one if the group is larger than the node.

    **Raises:**

    `ValueError` for a rank or a number of replicas that the program does not have.
    """
    _check_factor(factor, "a rank's compute", positive=True)
    if not 0 <= _whole(rank) < program.num_ranks:
        raise ValueError(
            f"There is no pipeline rank {rank}; the program has 0 to {program.num_ranks - 1}."
        )
    if replicas is not None and not 1 <= _whole(replicas) <= program.num_replicas:
        raise ValueError(
            f"{replicas} slow replicas were given; the program has 1 to {program.num_replicas}."
        )
    slow = (program.ops.rank == rank) & ~program.ops.is_send_recv
    unit = jnp.ones((1,), program.latencies.mean.dtype)
    ranks = jnp.ones((program.num_ranks,), unit.dtype)
    adjustment = adjusted(program, np.where(slow, 0, -1), unit * factor, unit, ranks)
    return Scenario(dataclasses.replace(program, adjustment=adjustment), replicas)


def _check_factor(value: Any, target: str, *, positive: bool) -> None:
    if isinstance(value, str | bool) or not np.isscalar(value):
        raise ValueError(
            f"The factor on {target} is {value!r}; give a number, such as 1.2 for 20 % more."
        )
    number: Any = value
    if not (np.isfinite(number) and (number > 0 or (number == 0 and not positive))):
        must = "be positive" if positive else "not be negative"
        raise ValueError(f"The factor {number} on {target} must {must}.")


def scale_kernel(program: Program, kind: str, factor: float) -> Scenario:
    """A scenario in which the latency of all kernels of a kind is multiplied by a factor:
    `scale_kernel(program, "all_gather", 0.8)` makes them a fifth faster.

    **Arguments:**

    - `program`: the unchanged step.
    - `kind`: the kind of kernel.
    - `factor`: the factor on the latency, at least zero.

    **Raises:**

    `ValueError` for a kind that the program does not have.
    """
    _check_factor(factor, "a latency", positive=False)
    if kind not in program.latencies.kinds:
        raise ValueError(unknown_name("kind of kernel", kind, program.latencies.kinds))
    return Scenario(turned(program, {("kernel", kind, "mean"): factor}))
