"""Shared by all plots: axes, colours that also differ in greyscale, and units of time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from .._installed import needed
from .._misc import as_step_times, unknown_name


# From light to dark, so that they differ in a grey copy, too; lines also differ in their style.
LIGHT, MEDIUM, DARK, ACCENT = "#c9d8ee", "#7c9fd0", "#17335f", "#b5301c"
LINE_STYLES = {"p5": (0, (1, 1)), "p50": "-", "p95": "--", "p99": "-."}


def axes(ax: Any, size: tuple[float, float] = (7.0, 3.2)) -> Any:
    """The given axes, or those of a new figure.

    **Raises:**

    `ImportError` if matplotlib is not installed; `ValueError` if `ax` is not axes.
    """
    Axes = needed("matplotlib.axes").Axes
    if ax is None:
        return _new_axes(needed("matplotlib.figure").Figure, size)
    if not isinstance(ax, Axes):
        raise ValueError(
            f"`ax` is a {type(ax).__name__}; give matplotlib's axes, or leave `ax` out to get new "
            "ones."
        )
    return ax


def _new_axes(figure_type: Any, size: tuple[float, float]) -> Any:
    """Axes of a figure that a notebook shows or, outside of a notebook, of a figure without a
    window.
    """
    import matplotlib

    if matplotlib.get_backend().lower() == "agg":
        return figure_type(figsize=size, layout="constrained").subplots()
    import matplotlib.pyplot as plt

    return plt.figure(figsize=size, layout="constrained").subplots()


def finished(ax: Any, xlabel: str, ylabel: str, *, columns: int = 0) -> Any:
    """Labels axes and removes decoration. A legend of so many `columns` is above the axes, because
    they have no room for one.
    """
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize="small", **(above if columns else {}))
    return ax


def plain_numbers(axis: Any) -> None:
    """Few ticks, labelled with complete numbers: 1.605, not 5e-3 with an offset of 1.6."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(ScalarFormatter(useOffset=False))


def whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers only, such as those of ranks."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def measured_steps(measured: Any) -> Float[np.ndarray, " steps"]:
    """Measured step times, in seconds, or of a data frame.

    **Raises:**

    `ValueError` unless they are a list of positive numbers.
    """
    steps = np.asarray(as_step_times(measured), float)
    if steps.ndim != 1 or not len(steps) or not np.all(np.isfinite(steps) & (steps > 0)):
        raise ValueError(
            "Measured steps must be a list of step times, each a positive number of seconds."
        )
    return steps


def table_columns(rows: Any, *names: str) -> list[list[Any]]:
    """Some columns of a table: a polars frame, or a row for each dictionary.

    **Raises:**

    `ValueError` for a table without rows, or if one of the columns is missing.
    """
    rows = rows.to_dicts() if hasattr(rows, "to_dicts") else list(rows)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError("A table must be a polars frame or dictionaries, with one row or more.")
    for name in names:
        if not all(name in row for row in rows):
            raise ValueError(unknown_name("column", name, rows[0]))
    return [[row[name] for row in rows] for name in names]
