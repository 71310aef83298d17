from collections.abc import Mapping
from typing import Any

import numpy as np

from .._misc import unit_of_seconds
from ._axes import MEDIUM, axes, finished, plain_numbers, short


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
    ax.set_yticks(places, [short(name) for name in parts])
    ax.set_ylim(len(parts) - 0.5, -0.5)
    plain_numbers(ax.xaxis)
    return finished(ax, xlabel=f"part of the mean step time ({unit})", ylabel="part")
