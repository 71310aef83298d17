from collections.abc import Sequence
from typing import Any

import numpy as np

from ._axes import ACCENT, DARK, axes, columns_of, finished, plain_numbers


_STYLES = {
    "mean": (DARK, "-", "o"),
    "p50": ("0.45", ":", "v"),
    "p95": (ACCENT, "--", "s"),
    "p99": ("black", "-.", "^"),
}


_ROOM = 0.11  # The least distance of two labels, as a share of the axis.


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
    (sizes,) = columns_of(rows, over)
    order = np.argsort(sizes, kind="stable")
    sizes = np.asarray(sizes, float)[order]
    for name in figures:
        color, line, marker = _STYLES.get(name, ("0.3", "-", "x"))
        (values,) = columns_of(rows, f"{name}_s")
        values = np.asarray(values, float)[order]
        ends = _interval(rows, name, order, values)
        ax.errorbar(
            sizes,
            values,
            yerr=ends,
            color=color,
            linestyle=line,
            marker=marker,
            markersize=4,
            capsize=2,
            label=name,
        )
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
    return finished(ax, xlabel=label or over, ylabel="step time (s)")


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
        low, high = columns_of(rows, f"{name}_low_s", f"{name}_high_s")
    except ValueError:
        return None
    ends = np.stack(
        [values - np.asarray(low, float)[order], np.asarray(high, float)[order] - values]
    )
    return np.maximum(np.nan_to_num(ends), 0)
