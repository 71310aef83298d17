"""Plots of laws: of the step time, beside measured steps, and of a training run."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._misc import check_type, plural
from ..law import QUANTILES, Law
from ..runs import RunLaw
from ._axes import ACCENT, DARK, LIGHT, LINE_STYLES, axes, finished, measured_steps, plain_numbers


# The law is shown between these of its quantiles.
_ENDS = (5e-4, 1 - 5e-4)


def histogram(law: Law, measured: Any = None, *, bins: int = 60, ax: Any = None) -> Any:
    """Plots the histogram of the step time and its quantiles, and that of measured steps over it.

    **Arguments:**

    - `law`: from `simulate`.
    - `measured`: measured step times, in seconds, or `None`. Steps beyond the last bin are counted
        in the legend.
    - `bins`: the number of bins.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: the share of steps in each bin, in percent, over step time in seconds.

    **Raises:**

    `ValueError` for measured steps that are not positive numbers; `ImportError` without matplotlib.
    """
    check_type(law, Law, "law", "use `simulate` to get one")
    ax = axes(ax)
    low, high = np.asarray(law.quantile(np.array(_ENDS)))
    if measured is not None:
        measured = measured_steps(measured)
        low, high = min(low, measured.min()), max(high, np.quantile(measured, 0.99))
    edges = _edges(low, high, bins)
    share = np.diff(np.asarray(law.cdf(edges)))
    share[0] += law.cdf(float(edges[0]))
    ax.stairs(100 * share, edges, fill=True, color=LIGHT, label="predicted")
    if measured is not None:
        counts, _ = np.histogram(measured, edges)
        beyond = int(np.sum(measured > edges[-1]))
        slower = f" ({beyond} slower)" if beyond else ""
        label = f"measured, {plural(len(measured), 'step')}{slower}"
        ax.stairs(100 * counts / len(measured), edges, color=ACCENT, linewidth=1.2, label=label)
    _quantiles(ax, law, QUANTILES, "s")
    return finished(ax, "step time (s)", "steps per bin (%)", columns=3)


def cdf(law: Law, measured: Any = None, *, ax: Any = None) -> Any:
    """Plots the distribution function of the step time, with confidence intervals of the usual
    quantiles, and the empirical distribution function of measured steps.

    **Arguments:**

    - `law`: from `simulate`.
    - `measured`: measured step times, in seconds, or `None`.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: probability over step time in seconds.

    **Raises:**

    `ValueError` for what is not a law, and for measured steps that are not positive numbers;
    `ImportError` without matplotlib.
    """
    check_type(law, Law, "law", "use `simulate` to get one")
    ax = axes(ax)
    levels = np.linspace(*_ENDS, 1000)
    ax.plot(np.asarray(law.quantile(levels)), levels, color=DARK, label="predicted")
    label: str | None = "95 % interval"
    for q in QUANTILES.values():
        low, high = law.quantile_interval(q)
        if np.isfinite(low) and high > low:
            ax.plot([low, high], [q, q], color=LIGHT, linewidth=5, zorder=1, label=label)
            label = None
    if measured is not None:
        steps = np.sort(measured_steps(measured))
        share = np.arange(1, len(steps) + 1) / len(steps)
        look = {"color": ACCENT, "linestyle": "--", "where": "post"}
        ax.step(steps, share, label=f"measured, {plural(len(steps), 'step')}", **look)
    plain_numbers(ax.xaxis)
    ax.set_ylim(0, 1.02)
    return finished(ax, "step time (s)", "probability of a faster step")


def qq(law: Law, measured: Any, *, ax: Any = None) -> Any:
    """Plots the quantiles of measured steps over those of a law. They are on the diagonal if both
    agree, parallel to it if only the level differs, and steeper if measured steps spread more.

    **Arguments:**

    - `law`: from `simulate`.
    - `measured`: measured step times, in seconds, at least one.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes, both in seconds. The i-th of n steps in ascending order is plotted at the level
    `(i - 1/2) / n`.

    **Raises:**

    `ValueError` for measured steps that are not positive numbers; `ImportError` without matplotlib.
    """
    check_type(law, Law, "law", "use `simulate` to get one")
    ax = axes(ax, (4.2, 4.2))
    steps = np.sort(measured_steps(measured))
    levels = (np.arange(len(steps)) + 0.5) / len(steps)
    predicted = np.asarray(law.quantile(levels))
    low, high = min(steps[0], predicted[0]), max(steps[-1], predicted[-1])
    ax.plot([low, high], [low, high], color=DARK, linewidth=1, label="agreement")
    label = f"{len(steps):,} measured steps"
    ax.plot(predicted, steps, "o", color=ACCENT, markersize=3.5, fillstyle="none", label=label)
    for axis in (ax.xaxis, ax.yaxis):
        plain_numbers(axis)
        axis.get_major_locator().set_params(nbins=4)
    ax.set_aspect("equal", adjustable="datalim")
    return finished(ax, "predicted step time (s)", "measured step time (s)")


def training_run(
    law: RunLaw, *, deadline_days: float | None = None, bins: int = 60, ax: Any = None
) -> Any:
    """Plots the law of the days that a training run takes, and the probability of meeting a
    deadline.

    **Arguments:**

    - `law`: from `prism.training_run`.
    - `deadline_days`: a deadline in days after the first step, or `None`.
    - `bins`: the number of bins.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: the share of runs in each bin, in percent, over days.

    **Raises:**

    `ValueError` for a deadline that is not positive; `ImportError` without matplotlib.
    """
    ax = axes(ax)
    edges = _edges(law.quantile(0.001), law.quantile(0.999), bins)
    counts, _ = np.histogram(law.days, edges)
    label = f"{law.num_runs:,} simulated runs"
    ax.stairs(100 * counts / len(law.days), edges, fill=True, color=LIGHT, label=label)
    _quantiles(ax, law, {"p5": 0.05, "p50": 0.5, "p95": 0.95}, "days")
    if deadline_days is not None:
        chance = 100 * law.probability(deadline_days).value
        label = f"deadline: {chance:.3g} % by then"
        ax.axvline(deadline_days, color=ACCENT, linewidth=2.5, label=label)
    return finished(ax, "days from first to last step", "runs per bin (%)")


def _edges(low: float, high: float, bins: int) -> np.ndarray:
    if high <= low:  # Nothing varies.
        low, high = 0.99 * low, 1.01 * high
    return np.linspace(low, high, bins + 1)


def _quantiles(ax: Any, law: Law | RunLaw, levels: Mapping[str, float], unit: str) -> None:
    """Quantiles as vertical lines, and axes for a histogram below them."""
    for name, q in levels.items():
        at = float(law.quantile(q))
        label = f"{name} {at:.4g} {unit}"
        ax.axvline(at, color=DARK, linewidth=1, linestyle=LINE_STYLES[name], label=label)
    plain_numbers(ax.xaxis)
    ax.set_ylim(bottom=0)
