"""What a figure of the step time depends on: kernels, stages, ranks and shared factors."""

import dataclasses
import functools as ft
import itertools as it
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from .._estimate import Estimate
from .._installed import needed
from .._misc import plural
from .._progress import progress_bar
from .._summary import Column, Shown, Table
from ..program import Program
from ._check import check_figure, check_reached
from ._derivative import figure_gradients
from ._figure import Figure, figure, figure_value
from ._jackknife import Jackknifed, combined, stacked, sure_of_zeros, withheld
from ._knobs import ELEMENTARY, Label, check_part_names, slopes_by_part, varied
from ._objectives import AbstractObjective


_MOST_GAINS = 10
_MOST_SHAPLEY = 10


@dataclasses.dataclass(frozen=True)
class Part:
    """How a figure depends on one part of a program. Elasticities have no unit; all other values
    are in the unit of the figure. An attribute that does not apply to a part is `None`.

    **Attributes:**

    - `group`: `kernel`, `shared factor`, `stalls`, `stage` or `rank`.
    - `name`: the name of the part.
    - `mean`: the derivative with respect to a relative change of the mean latency of the part: a
        hundredth of it is saved if the part takes 1 % less. Not all of it can be saved of a stage,
        or of the GPUs of a rank, for then others decide.
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
    - `notes`: which standard errors are withheld (`nan`), as too few replica samples decide a
        figure.
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
        pl = needed("polars")
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

    def headline(self) -> str:
        lines = [
            self._advice(),
            f"all variability together: {self.whole_gain}; the sum of the gains of kernels, "
            f"factors and stalls: {self.sum_of_gains}",
            *(f"Shapley value of {name}: {value}" for name, value in self.shapley.items()),
            plural(self.num_samples, "step"),
        ]
        return "\n".join(filter(None, lines))

    def _advice(self) -> str:
        """By how much the figure falls if a spread halves, to first order, for the three kernels
        and factors where that is most.
        """
        slopes = {
            part.name: part.spread.value
            for part in self.parts
            if part.spread and part.group in ("kernel", "shared factor")
        }
        most = sorted(slopes, key=slopes.__getitem__, reverse=True)[:3]
        factor, unit = (500, " ms") if self.unit == "s" else (0.5, "")
        falls = [
            f"{factor * slopes[name]:.2g}{unit} if that of {name} halves"
            for name in most
            if slopes[name] > 0
        ]
        if not falls:
            return ""
        first = falls[0].replace("that of", "the spread of", 1)
        return f"{self.objective} falls by {', '.join([first, *falls[1:]])} (to first order)"

    def summary(self, top: int | None = None) -> Table:
        """A row for each part: the `top` first, and the parts below whose mean is longer than that
        of each of these; others are only counted.
        """
        first, below = self.parts[:top], self.parts[len(self.parts[:top]) :]
        longest = max((part.mean.value for part in first if part.mean), default=0.0)
        long = [part for part in below if part.mean and part.mean.value > longest]
        rows = [*first, *long, *(part for part in below if part not in long)]
        unit = self.unit.strip("1")
        value = f"{self.value} {unit}".rstrip()
        title = (
            f"{self.objective} is {value}; its slope in a part's latency (mean) and variability "
            "(spread), and its fall if the part did not vary (gain)"
        )
        others_decide = any(part.group in ("stage", "rank") and part.mean for part in self.parts)
        figures = (Column(name, unit=unit) for name in ("mean", "spread", "gain"))
        notes = (*self.notes, *[_NOT_SAVED] * others_decide)
        most = None if top is None else len(first) + len(long)
        return Table((Column("part", "name"), *figures), rows, title, notes, most)


_NOT_SAVED = (
    "GPUs of a rank, stages: 1 % less time saves 1 % of the mean, but not all of it can be saved, "
    "for then others decide"
)
_FIGURES = tuple(field.name for field in dataclasses.fields(Part))[2:]


def sensitivity(
    program: Program,
    objective: AbstractObjective,
    *,
    num_samples: int = 8192,
    key: "jax.Array",
    parts: Iterable[str] | None = None,
    shapley: Iterable[str] = (),
    progress: bool = False,
) -> Sensitivity:
    """Computes what a figure of the step time depends on, and what variability costs.

    **Arguments:**

    - `program`: the step.
    - `objective`: the figure.
    - `num_samples`: how many steps to simulate of each program. Standard errors come from the
        jackknife.
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
    count = check_figure(program, objective, num_samples, key)
    parts = None if parts is None else check_part_names(program, parts)
    shapley = _check_shapley(program, shapley)
    options: dict[str, Any] = {"num_samples": count, "key": key}
    before = figure(varied(program, {}), objective, progress=progress, **options)
    check_reached(objective, before.value)
    value = figure_value(before)
    labels, derivatives = _derivatives(program, before)
    rows = _rows(labels, derivatives, value)

    def gains(sets: list[tuple[str, ...]], label: str) -> Jackknifed:
        """By how much the figure falls without the variability of each set of parts."""
        figures = []
        # One program after the other, so that memory holds the steps of one.
        with progress_bar(len(sets), progress, label, "program") as advance:
            for without in sets:
                changed = varied(program, dict.fromkeys(without, 0.0))
                after = figure(changed, objective, like=before.simulated, **options)
                figures.append(figure_value(after))
                advance(1)
        return combined(np.subtract, value, stacked(*figures))

    varying = [row for row in rows if row.spread and row.spread.value]
    elements = [row.name for row in varying if row.group in ELEMENTARY]
    wanted = [row.name for row in varying[:_MOST_GAINS]] if parts is None else parts
    chosen = list(dict.fromkeys([*wanted, *elements]))
    falls = gains([*((name,) for name in chosen), tuple(elements)], "gains")
    places = [chosen.index(name) for name in elements]
    total = combined(lambda x: x[:, places].sum(1, keepdims=True), falls)
    *of_chosen, whole_gain = falls.estimates()
    gained = dict(zip(chosen, of_chosen, strict=True))
    return Sensitivity(
        objective=str(objective),
        unit=objective.unit,
        value=value.estimates()[0],
        parts=tuple(dataclasses.replace(row, gain=gained.get(row.name)) for row in rows),
        sum_of_gains=total.estimates()[0],
        whole_gain=whole_gain,
        shapley=_shapley(shapley, gains),
        num_samples=count,
        notes=(
            *withheld(f"{objective}", float(value.support[0])),
            *withheld(f"The derivative of {objective}", float(derivatives.support.min())),
            *withheld("A gain", float(falls.support.min())),
        ),
    )


def _check_shapley(program: Program, names: Iterable[str]) -> list[str]:
    """The names of parts as a list. Raises a `ValueError` for too many, or one given twice."""
    names = check_part_names(program, names)
    if len(names) > _MOST_SHAPLEY:
        raise ValueError(f"`shapley` takes up to {_MOST_SHAPLEY} parts; {len(names)} were given.")
    if len(set(names)) < len(names):
        raise ValueError("`shapley` names a part twice; name each once.")
    return names


def _derivatives(program: Program, before: Figure) -> tuple[list[Label], Jackknifed]:
    """The derivatives of the figure with respect to all knobs, and what each is of."""
    gradients, rests_on = figure_gradients(before)
    by_part = slopes_by_part(program, gradients)
    slopes = np.array([*by_part.values()], np.float64).T
    fewest = sure_of_zeros(slopes[0], slopes[1:], np.full(len(slopes[0]), rests_on))
    return [*by_part], Jackknifed(slopes[0], slopes[1:], fewest)


def _rows(labels: list[Label], derivatives: Jackknifed, value: Jackknifed) -> list[Part]:
    """A row for each part, the most costly first."""
    relative = combined(lambda x, y: x / np.where(y == 0, np.nan, y), derivatives, value)
    fields: dict[tuple[str, str], dict[str, Estimate]] = {}
    pairs = zip(derivatives.estimates(), relative.estimates(), strict=True)
    for (group, name, moment), (derivative, elasticity) in zip(labels, pairs, strict=True):
        row = fields.setdefault((group, name), {})
        row[moment] = derivative
        if math.isfinite(elasticity.value):  # Not relative to a figure of zero.
            row[f"{moment}_elasticity"] = elasticity
    rows = [Part(*label, **row) for label, row in fields.items()]
    return sorted(rows, key=lambda row: -abs(row.spread.value) if row.spread else 0.0)


def _shapley(names: list[str], gains) -> dict[str, Estimate]:
    """The Shapley value of each part: the mean over all orders of what it adds to the gain."""
    count = len(names)
    if not count:
        return {}
    sets = [c for size in range(count + 1) for c in it.combinations(names, size)]
    number = {frozenset(names): i for i, names in enumerate(sets)}
    falls = gains(sets, "Shapley values")

    def value(name, gained):
        total = np.zeros(len(gained))
        for members in sets:
            if name in members:
                without = frozenset(members) - {name}
                weight = 1 / (count * math.comb(count - 1, len(without)))
                added = gained[:, number[frozenset(members)]] - gained[:, number[without]]
                total += weight * added
        return total[:, None]

    return {name: combined(ft.partial(value, name), falls).estimates()[0] for name in names}
