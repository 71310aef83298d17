"""What a figure of the step time depends on: kernels, stages, ranks and shared factors."""

import dataclasses
import functools as ft
import itertools as it
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from .._estimate import Estimate
from .._summary import Column, Shown, Table
from ..engine import check_program, vector_rule_notes
from ..program import Program
from ._bootstrap import (
    MARGIN,
    Bootstrapped,
    check_num_steps,
    combined,
    sure_of_zeros,
    withheld,
)
from ._check import check_objective, check_reached, check_steps
from ._estimate import Figure, figure, figure_value, gradients
from ._gains import falls
from ._knobs import (
    ELEMENTARY,
    Knobs,
    apply_knobs,
    check_parts,
    neutral,
    parts_of,
    scaled,
    through_knobs,
)
from ._objectives import AbstractObjective
from ._stages import ranks_of_stages


_MOST_GAINS = 10
_MOST_SHAPLEY = 10


@dataclasses.dataclass(frozen=True)
class Part:
    """How a figure depends on one part of a program. Elasticities have no unit; all other values
    are in the unit of the figure. An attribute that does not apply to a part is `None`.

    **Attributes:**

    - `group`: `kernel`, `shared factor`, `stalls`, `stage` or `rank`.
    - `name`: the name of the part.
    - `mean`: the derivative with respect to a relative change of the mean latency of the part. To
        first order, the figure would fall by this much if the part took no time.
    - `spread`: the derivative with respect to a relative change of the spread of the part (for
        stalls, of their rate): what its variability costs.
    - `mean_elasticity`, `spread_elasticity`: the same derivatives, divided by the figure.
    - `gain`: by how much the figure falls without the part's variability: simulated with the same
        random numbers.
    """

    group: str
    name: str
    mean: Estimate | None = None
    mean_elasticity: Estimate | None = None
    spread: Estimate | None = None
    spread_elasticity: Estimate | None = None
    gain: Estimate | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Sensitivity(Shown):
    """The result of `sensitivity`.

    **Attributes:**

    - `objective`, `unit`: the name of the figure, and its unit: `"s"`, or `"1"` for a probability.
    - `value`: the value of the figure.
    - `parts`: all parts, those whose variability costs most first.
    - `sum_of_gains`: the sum of the gains of all kernels, shared factors and stalls, each removed
        alone.
    - `whole_gain`: the gain without the variability of all of them at once. It would equal
        `sum_of_gains` if variances were additive and the figure were linear in them.
    - `shapley`: for each part named in the argument `shapley`, its Shapley value: its share of
        their joint gain, averaged over all orders of removing them (Owen, "Sobol' indices and
        Shapley value", 2014).
    - `num_samples`: how many steps were simulated.
    - `notes`: a warning where the vector rule of replicas, which all figures follow, is too low;
        and which standard errors are withheld (`nan`), as too few replica samples decide a figure.
    """

    objective: str
    unit: str
    value: Estimate
    parts: tuple[Part, ...]
    sum_of_gains: Estimate
    whole_gain: Estimate
    shapley: dict[str, Estimate]
    num_samples: int
    notes: tuple[str, ...] = ()

    def table(self) -> Any:
        """A polars frame with a row for each part and the unit in each header."""
        import polars as pl

        rows = []
        for part in self.parts:
            row: dict[str, Any] = {"group": part.group, "name": part.name}
            for name in _FIGURES:
                figure, unit = getattr(part, name), "" if "_" in name else f" [{self.unit}]"
                row[f"{name}{unit}"] = figure and figure.value
                row[f"{name}_error{unit}"] = figure and figure.standard_error
            rows.append(row)
        numbers = dict.fromkeys([*rows[0]][2:], pl.Float64)
        return pl.DataFrame(rows, schema_overrides=numbers)

    def summary(self) -> Table:
        unit = "" if self.unit == "1" else f" {self.unit}"
        title = (
            f"{self.objective} is {self.value}{unit}; its fall if a part took no time (mean) or "
            "did not vary (spread: to first order; gain: simulated)"
        )
        unit = unit.strip()
        columns = [
            Column("part", "name"),
            *(Column(n, unit=unit) for n in ("mean", "spread", "gain")),
        ]
        return Table(columns, self.parts, title, self.notes)


_FIGURES = tuple(field.name for field in dataclasses.fields(Part))[2:]


def sensitivity(
    program: Program,
    objective: AbstractObjective,
    *,
    num_samples: int,
    key: PRNGKeyArray,
    parts: Iterable[str] | None = None,
    shapley: Iterable[str] = (),
    progress: bool = False,
) -> Sensitivity:
    """Computes what a figure of the step time depends on, and what variability costs.

    **Arguments:**

    - `program`: the step.
    - `objective`: the figure.
    - `num_samples`: how many steps to simulate. Standard errors come from the
        bootstrap.
    - `key`: a `jax.random` key.
    - `parts`: names of the parts whose gain is simulated as well, such as `gemm`, `rank`,
        `stalls of gemm`, `stage 3` or `GPUs of rank 0`; by default the ten whose variability costs
        most.
    - `shapley`: names of up to ten parts; their joint gain is divided among them. Each part doubles
        the work.
    - `progress`: whether to show bars on stderr.

    **Returns:**

    A [`Sensitivity`][].

    **Raises:**

    `ValueError` if a name is not of a part of the program, or if `shapley` has too many names.
    """
    check_program(program, key)
    check_objective(objective)
    ones = neutral(program)
    names = parts_of(ones)
    parts = None if parts is None else check_parts(ones, parts)
    shapley = _check_shapley(ones, shapley)
    check_steps(objective, num_samples)
    count = check_num_steps(num_samples)
    options: dict[str, Any] = {"key": key, "progress": progress}
    base = apply_knobs(program, ones)
    before = figure(base, objective, num_samples=count, margin=MARGIN, **options)
    check_reached(objective, before.value)
    value = figure_value(before)
    derivatives = _with_errors(program, ones, before)
    rows = _rows(list(_derivatives(program, ones)), derivatives, value)

    def gains(sets: list[tuple[str, ...]], what: str) -> Bootstrapped:
        changed = [apply_knobs(program, scaled(ones, dict.fromkeys(names, 0.0))) for names in sets]
        return falls(changed, before, objective, what=what, **options)

    varying = [row.name for row in rows if row.spread and row.spread.value]
    elements = [name for name in varying if names[name][0] in ELEMENTARY]
    chosen = list(dict.fromkeys([*(varying[:_MOST_GAINS] if parts is None else parts), *elements]))
    each = gains([*((name,) for name in chosen), tuple(elements)], "gains")
    places = [chosen.index(name) for name in elements]
    total = combined(lambda x: x[:, places].sum(1, keepdims=True), each)
    *of_chosen, whole = each.estimates()
    gained = dict(zip(chosen, of_chosen, strict=True))
    return Sensitivity(
        objective=str(objective),
        unit=objective.unit,
        value=value.estimates()[0],
        parts=tuple(dataclasses.replace(row, gain=gained.get(row.name)) for row in rows),
        sum_of_gains=total.estimates()[0],
        whole_gain=whole,
        shapley=_shapley(shapley, gains),
        num_samples=count,
        notes=(
            *vector_rule_notes(before.simulated.run),
            *withheld(f"{objective}", float(value.support[0])),
            *withheld(f"The derivative of {objective}", float(derivatives.support.min())),
            *withheld("A gain", float(each.support.min())),
        ),
    )


def _with_errors(program: Program, ones: Knobs, before: Figure) -> Bootstrapped:
    """The derivatives of the figure with respect to all knobs."""
    found, rests_on = gradients(before)
    knobs = [through_knobs(program, ones, gradient) for gradient in found]
    slopes = np.array([list(_derivatives(program, one).values()) for one in knobs])
    fewest = sure_of_zeros(slopes[0], slopes[1:], np.full(len(slopes[0]), rests_on))
    return Bootstrapped(slopes[0], slopes[1:], fewest)


def _check_shapley(knobs: Knobs, names: Iterable[str]) -> list[str]:
    """The names of parts as a list. Raises a `ValueError` for too many, or one given twice."""
    names = check_parts(knobs, names)
    if len(names) > _MOST_SHAPLEY:
        raise ValueError(f"`shapley` takes up to {_MOST_SHAPLEY} parts; {len(names)} were given.")
    if len(set(names)) < len(names):
        raise ValueError("`shapley` names a part twice; name each once.")
    return names


def _derivatives(program: Program, knobs: Knobs) -> dict[tuple[str, str, str], float]:
    """The derivatives by the group of a part, its name, and `mean` or `spread`. That of a rank's
    mean is the sum of those of its stages.
    """
    found: dict[tuple[str, str, str], Any] = {}
    for kind in sorted(knobs.kernel_mean):  # A traced dictionary comes back in this order.
        found["kernel", kind, "mean"] = knobs.kernel_mean[kind]
        found["kernel", kind, "spread"] = knobs.kernel_spread[kind]
    for name, value in sorted(knobs.factor_spread.items()):
        found["shared factor", name, "spread"] = value
    for kind, value in sorted(knobs.stall_rate.items()):
        found["stalls", f"stalls of {kind}", "spread"] = value
    mean, spread = (np.asarray(x, float) for x in (knobs.stage_mean, knobs.stage_spread))
    for stage in range(len(mean)):
        found["stage", f"stage {stage}", "mean"] = mean[stage]
        found["stage", f"stage {stage}", "spread"] = spread[stage]
    of_ranks = np.bincount(ranks_of_stages(program), mean, program.num_ranks)
    for rank in range(program.num_ranks):
        found["rank", f"GPUs of rank {rank}", "mean"] = of_ranks[rank]
        found["rank", f"GPUs of rank {rank}", "spread"] = knobs.gpu_spread[rank]
    return {label: float(value) for label, value in found.items()}


def _rows(
    labels: list[tuple[str, str, str]], derivatives: Bootstrapped, value: Bootstrapped
) -> list[Part]:
    """A row for each part, the most costly first."""
    relative = combined(lambda x, y: x / np.where(y == 0, np.nan, y), derivatives, value)
    fields: dict[tuple[str, str], dict[str, Estimate]] = {}
    pairs = zip(derivatives.estimates(), relative.estimates(), strict=True)
    for (group, name, what), (derivative, elasticity) in zip(labels, pairs, strict=True):
        row = fields.setdefault((group, name), {})
        row[what] = derivative
        if math.isfinite(elasticity.value):  # Not relative to a figure of zero.
            row[f"{what}_elasticity"] = elasticity
    rows = [Part(*label, **row) for label, row in fields.items()]
    return sorted(rows, key=lambda row: -abs(row.spread.value) if row.spread else 0.0)


def _shapley(names: list[str], gains) -> dict[str, Estimate]:
    """The Shapley value of each part: the mean over all orders of what it adds to the gain."""
    count = len(names)
    if not count:
        return {}
    sets = [c for size in range(count + 1) for c in it.combinations(names, size)]
    number = {frozenset(names): i for i, names in enumerate(sets)}
    found = gains(sets, "Shapley values")

    def value(name, gained):
        total = np.zeros(len(gained))
        for members in sets:
            if name in members:
                others = frozenset(members) - {name}
                weight = 1 / (count * math.comb(count - 1, len(others)))
                added = gained[:, number[frozenset(members)]] - gained[:, number[others]]
                total += weight * added
        return total[:, None]

    return {name: combined(ft.partial(value, name), found).estimates()[0] for name in names}
