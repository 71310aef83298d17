"""Plots of tables: a row for each part or layout, the first on top, and figures over a size."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .._misc import check_type, quoted, unit_of_seconds
from ..analysis import Part, Sensitivity
from ._axes import ACCENT, DARK, MEDIUM, axes, finished, plain_numbers, table_columns


_MOST_OF_A_NAME = 44
# The colour, the line and the marker of a figure over a size.
_STYLES = {
    "mean": (DARK, "-", "o"),
    "p50": ("0.45", ":", "v"),
    "p95": (ACCENT, "--", "s"),
    "p99": ("black", "-.", "^"),
}
_ROOM = 0.11  # The least distance of two labels, as a share of the axis.


def breakdown(parts: Mapping[str, float], *, ax: Any = None) -> Any:
    """Plots the parts of a step as bars, one below the other, with the share of each.

    **Arguments:**

    - `parts`: the seconds of each part by name, such as `prism.predict(job).breakdown`.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: parts over seconds, milliseconds or microseconds.

    **Raises:**

    `ValueError` without any part; `ImportError` without matplotlib.
    """
    if not parts:
        raise ValueError("There is nothing to plot: `parts` is empty.")
    ax = axes(ax, (7.0, 0.8 + 0.28 * len(parts)))
    per_second, unit = unit_of_seconds(parts.values())
    seconds, places = np.array([*parts.values()], float), np.arange(len(parts))
    ax.barh(places, per_second * seconds, color=MEDIUM)
    total = seconds.sum()
    beside = {"textcoords": "offset points", "xytext": (3, 0), "va": "center", "fontsize": "small"}
    for place, s in zip(places, seconds if total else (), strict=False):
        # To the right of zero, too, where a part is negative: the names are to the left.
        ax.annotate(f"{100 * s / total:.1f} %", (per_second * max(s, 0.0), place), **beside)
    ax.margins(x=0.12)  # Room for the shares.
    ax.axvline(0, color="black", linewidth=0.8)
    _named(ax, parts)
    return finished(ax, f"part of the mean step time ({unit})", "part")


def layouts(
    rows: Any,
    *,
    label: str = "layout",
    mean: str = "mean [s]",
    p95: str = "p95 [s]",
    ax: Any = None,
) -> Any:
    """Plots the mean and the p95 of layouts, one below the other in the given order.

    **Arguments:**

    - `rows`: a table of layouts: a polars frame, or dictionaries.
    - `label`, `mean`, `p95`: the names of the columns; `mean` and `p95` are in seconds.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: layouts over step time in seconds.

    **Raises:**

    `ValueError` if a column is missing; `ImportError` without matplotlib.
    """
    names, means, quantiles = table_columns(rows, label, mean, p95)
    means, quantiles = np.asarray(means, float), np.asarray(quantiles, float)
    ax = axes(ax, (7.0, 0.9 + 0.28 * len(names)))
    places = np.arange(len(names))
    ax.hlines(places, means, quantiles, color=MEDIUM, linewidth=2.5, zorder=1)
    ax.plot(means, places, "o", color=DARK, label="mean")
    ax.plot(quantiles, places, "s", color=ACCENT, fillstyle="none", label="p95")
    _named(ax, names)
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    return finished(ax, "step time (s)", "layout")


def tornado(
    sensitivity: Sensitivity,
    *,
    of: Literal["spread", "mean"] = "spread",
    top: int = 10,
    ax: Any = None,
) -> Any:
    """Plots what each part of a step costs, the most costly part on top.

    **Arguments:**

    - `sensitivity`: from `prism.sensitivity`.
    - `of`: `"spread"` shows by how much the figure would fall without the variability of a part: as
        simulated (bars with 95 % intervals), where it was simulated, and to first order (diamonds).
        `"mean"` shows its slope in the latency of a part.
    - `top`: the most parts to show.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: parts over seconds, milliseconds or microseconds, or over probability if the figure is
    a probability.

    **Raises:**

    `ValueError` for what is not a sensitivity, and for another `of`; `ImportError` without
    matplotlib.
    """
    check_type(sensitivity, Sensitivity, "sensitivity", "use `sensitivity` to get one")
    if of not in ("spread", "mean"):
        raise ValueError(f"`of={of!r}` must be 'spread' or 'mean'.")
    parts = [part for part in sensitivity.parts if getattr(part, of) is not None]
    parts = sorted(parts, key=lambda part: -abs(_height(part, of)))[:top]
    ax = axes(ax, (7.0, 1.1 + 0.3 * len(parts)))
    per_second, unit = 1.0, "probability"
    if sensitivity.unit == "s":
        per_second, unit = unit_of_seconds(_height(part, of) for part in parts)
    bars = [part.gain if of == "spread" else part.mean for part in parts]
    bars = {place: bar for place, bar in enumerate(bars) if bar is not None}
    look = {"color": MEDIUM, "error_kw": {"ecolor": DARK, "capsize": 2}}
    values = [per_second * bar.value for bar in bars.values()]
    errors = [per_second * (bar.interval()[1] - bar.value) for bar in bars.values()]
    label = "simulated, 95 % interval" if of == "spread" else "first order, 95 % interval"
    ax.barh([*bars], values, xerr=errors, label=label, **look)
    if of == "spread":
        slopes = [per_second * part.spread.value for part in parts if part.spread]
        ax.plot(slopes, range(len(parts)), "D", color=ACCENT, markersize=5, label="first order")
    _named(ax, [part.name for part in parts])
    ax.axvline(0, color="black", linewidth=0.8)
    title = "fall of {} without its variability" if of == "spread" else "slope of {} in its latency"
    label = f"{title.format(sensitivity.objective)} ({unit})"
    return finished(ax, label, "part", columns=2)


def scale(
    rows: Any,
    over: str,
    *,
    figures: Sequence[str] = ("mean", "p95"),
    label: str | None = None,
    ax: Any = None,
) -> Any:
    """Plots figures of the step time over the size of a job, or over any other swept parameter.

    **Arguments:**

    - `rows`: from `prism.sweep`, or any polars frame or dictionaries with the column `over` and,
        for a figure such as `mean`, the columns `mean_s` and, if its interval is known,
        `mean_low_s` and `mean_high_s`.
    - `over`: the column of numbers on the horizontal axis.
    - `figures`: some of `mean`, `p50`, `p95`, `p99`.
    - `label`: the label of the horizontal axis, with its unit; by default the name of the column.
    - `ax`: matplotlib's axes; new ones by default.

    **Returns:**

    The axes: step time in seconds. The horizontal axis is logarithmic if the largest value is at
    least eight times the smallest.

    **Raises:**

    `ValueError` if a column is missing; `ImportError` without matplotlib.
    """
    ax = axes(ax)
    (sizes,) = table_columns(rows, over)
    order = np.argsort(sizes, kind="stable")
    sizes = np.asarray(sizes, float)[order]
    for name in figures:
        color, line, marker = _STYLES.get(name, ("0.3", "-", "x"))
        look = {"color": color, "linestyle": line, "marker": marker, "markersize": 4, "capsize": 2}
        (values,) = table_columns(rows, f"{name}_s")
        values = np.asarray(values, float)[order]
        ends = _interval(rows, name, order, values)
        ax.errorbar(sizes, values, yerr=ends, label=name, **look)
    if sizes[0] > 0 and sizes[-1] >= 8 * sizes[0]:
        ax.set_xscale("log", base=2)
        ticks = _apart(sizes)
        ax.set_xticks(ticks, [f"{x:,.12g}" for x in ticks])
        ax.minorticks_off()
    elif sizes[0] == sizes[-1]:
        ax.set_xticks(sizes[:1], [f"{sizes[0]:,.12g}"])
    else:
        plain_numbers(ax.xaxis)
    plain_numbers(ax.yaxis)
    return finished(ax, label or over, "step time (s)")


def _height(part: Part, of: str) -> float:
    figure = part.gain if of == "spread" and part.gain is not None else getattr(part, of)
    return figure.value


def _named(ax: Any, names: Collection[object]) -> None:
    """Names beside the rows, cut if they would leave no room for bars."""
    ax.set_yticks(range(len(names)), [quoted(name, _MOST_OF_A_NAME) for name in names])
    ax.set_ylim(max(len(names), 1) - 0.5, -0.5)
    plain_numbers(ax.xaxis)


def _apart(sizes: np.ndarray) -> list[float]:
    """The sizes whose labels fit on a logarithmic axis, chosen from the largest on."""
    least = _ROOM * np.log(sizes[-1] / sizes[0])
    kept = [float(sizes[-1])]
    for size in sizes[::-1].tolist():
        if np.log(kept[-1] / size) >= least:
            kept.append(size)
    return kept[::-1]


def _interval(rows, name, order, values) -> Any:
    """How far the interval reaches below and above each value; `None` if there is no interval."""
    try:
        low, high = table_columns(rows, f"{name}_low_s", f"{name}_high_s")
    except ValueError:
        return None
    ends = np.stack(
        [values - np.asarray(low, float)[order], np.asarray(high, float)[order] - values]
    )
    return np.maximum(np.nan_to_num(ends), 0)
