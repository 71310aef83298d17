"""The tail of systems, predicted from configuration.

A system of which the laws over systems were made is predicted by the laws of all machines but its
own. For any other system the shipped laws hold.
"""

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
import numpy as np

import prism_jax as prism
from prism_jax import data
from prism_jax.calibration._epistemic import laws_of_systems
from prism_jax.calibration._observe import upper_spread

from .families import tail_of
from .published import published
from .rows import attempt, note, with_kernels
from .systems import OF_SYSTEMS, Laws, System, fitted, spread_at, systems
from .tables import Folder, Row, by, percent, table, table_of


_SAMPLES = 8192
_DRAWN = 1000  # Systems, and steps of each.
_LEVELS = (np.arange(4000) + 0.5) / 4000
_NEAR = 0.02  # A published median of a name is that of the same bench.


def system_rows(folder: Folder) -> list[Row]:
    """A row for each system of `mlperf` and `mlperf_v6` in a folder like `../shared/data`.

    Where a system cannot be written as a job, its step is taken as measured, and the spread of
    steps as that of the law alone.
    """
    every, used = systems(folder), {*data.load_priors().system_spread.systems}
    shown = [one for one in every if one.name in used]
    whole = len(shown) == len(used)  # Otherwise nothing can be fitted anew.

    @ft.cache
    def without(machine: str) -> Laws:
        return fitted([one for one in shown if one.machine != machine])

    jobs = [row for row in published(folder) if row.job is not None and row.median]
    rows = []
    for one in every:
        laws = without(one.machine) if whole and one.name in used else None
        mine = [row for row in jobs if row.name in one.name.split(" ")]
        near = [row.job for row in mine if abs(row.seconds / one.seconds - 1) < _NEAR]
        rows.append(_row(one, laws, next(iter(near), None)))
    return rows


def _row(one: System, laws: Laws | None, job: data.Job | None) -> Row:
    simulated, reason = attempt(_simulated, job, laws, one) if job else (None, "")
    if reason:
        note(f"{one.name} cannot be simulated: {reason}")
    if simulated is None:
        given = _shipped(one.is_blackwell) if laws is None else laws.parameters(one.is_blackwell)
        spread = spread_at(given, one)
        found, tail = {}, float(np.exp(1.6449 * spread))
    else:
        spread, tail, found = simulated
    priors = data.load_priors() if laws is None else laws.priors
    drawn = [law.factors(_DRAWN) for law in laws_of_systems(priors, spread, _DRAWN)]
    low, high = np.quantile([tail_of(steps) for steps in drawn], [0.05, 0.95]).tolist()
    row: Row = {"table": one.group, "name": one.name, "measured": one.seconds, **found}
    row |= {"measured_p95_over_p50": 1 + one.tail, "predicted_p95_over_p50": tail}
    row["measured_std_over_p50"] = one.std
    row |= {"band": [low, high], "inside": low <= 1 + one.tail <= high}
    return row | {"left_out": laws is not None}


@ft.cache
def _shipped(is_blackwell: bool) -> dict[str, float]:
    variations = data.load_variability("hgx-b200" if is_blackwell else "dgx-h100")
    return next(one.parameters for one in variations if one.component == "step")


def _simulated(job: Any, laws: Laws | None, one: System) -> tuple[float, float, Row]:
    """The spread and p95/p50 of a job's steps; as `predicted`, their median; and their standard
    deviation over it.
    """
    if laws is not None:
        step = data.Variation("", "step", "lognormal", laws.parameters(one.is_blackwell))
        variability = data.replace_variations(job.kernels.variability, [step])
        job = with_kernels(job, variability=variability)
    key = jax.random.key(0)
    law = prism.simulate(prism.compile_job(job), num_samples=_SAMPLES, key=key)
    median, high = (float(law.quantile(q)) for q in (0.5, 0.95))
    spread = upper_spread(np.asarray(law.quantile(_LEVELS)))
    std = float(law.std) / median
    return spread, high / median, {"predicted": median, "predicted_std_over_p50": std}


_COLUMNS = {"systems": "{table}", "system": "{name}", "p50": "{p50}"}
_COLUMNS |= {"p50, measured": "{measured:.4g} s", "p95/p50": "{predicted_p95_over_p50:.4f}"}
_COLUMNS["of 90 % of systems"] = "{band[0]:.4f} .. {band[1]:.4f}"
_COLUMNS["p95/p50, measured"] = "{measured_p95_over_p50:.4f}{out}"
_COLUMNS |= {"std": "{std}", "std, measured": "{measured_std_over_p50:.2%}"}


def system_table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    shown = []
    for row in rows:
        simulated = "predicted" in row
        p50 = f"{row['predicted']:.4g} s" if simulated else ""
        std = percent(row["predicted_std_over_p50"], form=".2") if simulated else ""
        shown.append(row | {"p50": p50, "std": std, "out": " (out)" * (not row["inside"])})
    groups = []
    for name, mine in [("all", rows), *sorted(by("table", rows).items())]:
        tails = [(r["predicted_p95_over_p50"], r["measured_p95_over_p50"]) for r in mine]
        ratios = [(ours - 1) / (theirs - 1) for ours, theirs in tails if theirs > 1]
        ratio = f"{np.median(ratios):.2f}" if ratios else ""
        inside = sum(row["inside"] for row in mine)
        held = f"{inside} of {len(mine)} ({100 * inside / max(1, len(mine)):.0f} %)"
        groups.append((name, len(mine), ratio, held))
    sums = table(("systems", "number", "predicted over measured, median", "in the band"), groups)
    return f"{table_of(shown, _COLUMNS)}\n\n{sums}"


def systems_text(folder: Folder) -> str:
    """Both tables of systems, and that of the laws."""
    return f"{system_table(system_rows(folder))}\n\n{laws_table(folder)}"


def laws_table(folder: Folder) -> str:
    """The laws over all systems, as in `kernels/priors.toml` and `kernels/*/variability.csv`."""
    found = fitted(systems(folder))
    values = {"sigma, H100": found.hopper, "sigma, B200": found.blackwell, **found.seconds}
    cells = [(f"`{name}`", f"{value:.4g}") for name, value in values.items()]
    for name in OF_SYSTEMS:
        law = msgspec.to_builtins(getattr(found.priors, name))
        numbers = [f"{k} {v:.4g}" for k, v in law.items() if isinstance(v, int | float)]
        cells.append((f"`{name}`", ", ".join(numbers)))
    names = ", ".join(f'"{name}"' for name in found.priors.system_spread.systems)
    return f"{table(('law', 'value'), cells)}\n\nsystems = [{names}]"
