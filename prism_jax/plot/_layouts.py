from typing import Any

import numpy as np

from ._axes import ACCENT, DARK, MEDIUM, axes, columns_of, finished, plain_numbers, short


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
    names, means, quantiles = columns_of(rows, label, mean, p95)
    means, quantiles = np.asarray(means, float), np.asarray(quantiles, float)
    ax = axes(ax, (7.0, 0.9 + 0.28 * len(names)))
    places = np.arange(len(names))
    ax.hlines(places, means, quantiles, color=MEDIUM, linewidth=2.5, zorder=1)
    ax.plot(means, places, "o", color=DARK, label="mean")
    ax.plot(quantiles, places, "s", color=ACCENT, fillstyle="none", label="p95")
    ax.set_yticks(places, [short(name) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    plain_numbers(ax.xaxis)
    return finished(ax, xlabel="step time (s)", ylabel="layout")
