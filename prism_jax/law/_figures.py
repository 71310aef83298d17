"""The figures of a law, and the table of them."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._misc import plural
from .._summary import Column, Table


if TYPE_CHECKING:
    from ._law import Law


# The quantiles that tables show, by name.
QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}

# Noise is of no interest if it is a tenth of what the model may be off by.
_LITTLE = 0.1


def figures(
    law: "Law", level: float = 0.95, quantiles: Mapping[str, float] = QUANTILES
) -> dict[str, tuple[float, tuple[float, float]]]:
    """The mean, the standard deviation and quantiles, each with its confidence interval."""
    of_quantiles = {
        name: (float(law.quantile(q)), law.quantile_interval(q, level))
        for name, q in quantiles.items()
    }
    first = {
        "mean": (law.mean, law.mean_interval(level)),
        "std": (law.std, law.std_interval(level)),
    }
    return first | of_quantiles


def law_table(
    law: "Law",
    quantiles: Mapping[str, float] = QUANTILES,
    measured: Mapping[str, float] | None = None,
    expected: Mapping[str, tuple[float, float]] | None = None,
) -> Table:
    """A row for each figure of a law.

    **Arguments:**

    - `quantiles`: the quantiles to show, by name.
    - `measured`: measured figures in seconds, by name, to show beside the predicted ones.
    - `expected`: in which interval nine of ten measurements of such runs lie, by name
        (`calibration.Epistemic.intervals`). Without it, the table shows the intervals of the
        simulation's noise.
    """
    stopped = f"{law.num_samples:,} of " if law.interrupted else ""
    steps = f"{stopped}{plural(max(law.num_samples, law.requested), 'step')}"
    rows, unknown = [], []
    for name, (value, interval) in figures(law, quantiles=quantiles).items():
        row = {"figure": name, "predicted_s": value, "interval_s": interval}
        row["expected_s"] = (expected or {}).get(name)
        rows.append({**row, "measured_s": (measured or {}).get(name)})
        if interval[0] != interval[0]:
            unknown.append(f"* {name}: {law.why_unknown(quantiles.get(name))}")
    columns = [Column("step time", "figure")]
    if expected is None:
        columns.append(Column("predicted", "predicted_s", unit="s", error="interval_s"))
        columns.append(Column("95 % noise", "interval_s", unit="s"))
    else:
        columns.append(Column("predicted", "predicted_s", ".4g", "s"))
        columns.append(Column("90 % of such runs", "expected_s", unit="s"))
    if measured:
        columns.append(Column("measured", "measured_s", unit="s"))
        columns.append(Column("error", _error, "+.1f", "%"))
    if measured and expected is not None:
        columns.append(Column("within", _within))
    title = f"Law of {steps} ({law.sampling} sampling)"
    return Table(columns, rows, title, unknown)


def about_noise(law: "Law", expected: Mapping[str, tuple[float, float]]) -> str:
    """By how much more samples would change p95, compared with how far off it may be."""
    low, high = law.quantile_interval(0.95)
    if not math.isfinite(high - low):
        return f"noise of the simulation: not known of p95: {law.why_unknown(0.95)}"
    wide = (high - low) / (expected["p95"][1] - expected["p95"][0])
    advice = "more samples change nothing" if wide < _LITTLE else "more samples narrow it"
    share = 50 * (high - low) / law.quantile(0.95)
    return f"noise of the simulation: p95 +- {share:.1g} %; {advice}"


def _error(row: Mapping[str, Any]) -> float | None:
    """How far a prediction is off, in percent."""
    measured = row["measured_s"]
    return None if measured is None else 100 * (row["predicted_s"] / measured - 1)


def _within(row: Mapping[str, Any]) -> str | None:
    """Whether the measured figure lies in the expected interval."""
    if row["measured_s"] is None or row["expected_s"] is None:
        return None
    low, high = row["expected_s"]
    return "yes" if low <= row["measured_s"] <= high else "no"
