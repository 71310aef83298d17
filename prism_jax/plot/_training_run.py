from typing import Any

import numpy as np

from ..runs import RunLaw
from ._axes import ACCENT, DARK, LIGHT, LINE_STYLES, axes, finished, plain_numbers


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
    low, high = law.quantile(0.001), law.quantile(0.999)
    if high <= low:  # Nothing varies.
        low, high = 0.99 * low, 1.01 * high
    counts, edges = np.histogram(law.days, bins, (low, high))
    label = f"{len(law.days):,} simulated runs"
    ax.stairs(100 * counts / len(law.days), edges, fill=True, color=LIGHT, label=label)
    for name, q in {"p5": 0.05, "p50": 0.5, "p95": 0.95}.items():
        at = law.quantile(q)
        label = f"{name} {at:.4g} days"
        ax.axvline(at, color=DARK, linewidth=1, linestyle=LINE_STYLES[name], label=label)
    if deadline_days is not None:
        chance = 100 * law.probability(deadline_days).value
        label = f"deadline: {chance:.3g} % by then"
        ax.axvline(deadline_days, color=ACCENT, linewidth=2.5, label=label)
    plain_numbers(ax.xaxis)
    ax.set_ylim(bottom=0)
    return finished(ax, xlabel="days from first to last step", ylabel="runs per bin (%)")
