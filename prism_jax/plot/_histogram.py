from typing import Any

import numpy as np

from .._misc import check_type
from ..law import QUANTILES, Law
from ._axes import (
    ACCENT,
    DARK,
    LIGHT,
    LINE_STYLES,
    axes,
    finished,
    legend_above,
    measured_steps,
    plain_numbers,
)


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
    if high <= low:  # Nothing varies.
        low, high = 0.99 * low, 1.01 * high
    edges = np.linspace(low, high, bins + 1)
    share = np.diff(np.asarray(law.cdf(edges)))
    share[0] += law.cdf(float(edges[0]))
    ax.stairs(100 * share, edges, fill=True, color=LIGHT, label="predicted")
    if measured is not None:
        counts, _ = np.histogram(measured, edges)
        beyond = int(np.sum(measured > edges[-1]))
        label = f"measured, {len(measured):,} steps" + (f" ({beyond} slower)" if beyond else "")
        ax.stairs(100 * counts / len(measured), edges, color=ACCENT, linewidth=1.2, label=label)
    for name, q in QUANTILES.items():
        at = float(law.quantile(q))
        label = f"{name} {at:.4g} s"
        ax.axvline(at, color=DARK, linewidth=1, linestyle=LINE_STYLES[name], label=label)
    plain_numbers(ax.xaxis)
    ax.set_ylim(bottom=0)
    legend_above(ax, 3)
    return finished(ax, xlabel="step time (s)", ylabel="steps per bin (%)", legend=False)
