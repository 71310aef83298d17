from typing import Any, Literal

import numpy as np

from .._misc import check_type, unit_of_seconds
from ..analysis import Part, Sensitivity
from ._axes import ACCENT, DARK, MEDIUM, axes, finished, legend_above, plain_numbers, short


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
        `"mean"` shows by how much the figure would fall, to first order, if a part took no time.
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
    places = np.arange(len(parts))
    bars = [part.gain if of == "spread" else part.mean for part in parts]
    there = [(place, bar) for place, bar in zip(places, bars, strict=True) if bar is not None]
    label = "simulated, 95 % interval" if of == "spread" else "first order, 95 % interval"
    ax.barh(
        [place for place, _ in there],
        [per_second * bar.value for _, bar in there],
        xerr=[per_second * (bar.interval()[1] - bar.value) for _, bar in there],
        color=MEDIUM,
        error_kw={"ecolor": DARK, "capsize": 2},
        label=label,
    )
    if of == "spread":
        slopes = [per_second * part.spread.value for part in parts if part.spread]
        ax.plot(slopes, places, "D", color=ACCENT, markersize=5, label="first order")
    ax.set_yticks(places, [short(part.name) for part in parts])
    ax.set_ylim(max(len(parts), 1) - 0.4, -0.6)
    ax.axvline(0, color="black", linewidth=0.8)
    plain_numbers(ax.xaxis)
    what = "without its variability" if of == "spread" else "if it took no time"
    label = f"fall of {sensitivity.objective} {what} ({unit})"
    legend_above(ax, 2)
    return finished(ax, xlabel=label, ylabel="part", legend=False)


def _height(part: Part, of: str) -> float:
    figure = part.gain if of == "spread" and part.gain is not None else getattr(part, of)
    return figure.value
