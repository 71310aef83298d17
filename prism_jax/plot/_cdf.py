from typing import Any

import numpy as np

from .._misc import check_type
from ..law import QUANTILES, Law
from ._axes import ACCENT, DARK, LIGHT, axes, finished, measured_steps, plain_numbers


_LEVELS = np.linspace(0.0005, 0.9995, 1000)


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
    ax.plot(np.asarray(law.quantile(_LEVELS)), _LEVELS, color=DARK, label="predicted")
    labelled = False
    for q in QUANTILES.values():
        low, high = law.quantile_interval(q)
        if np.isfinite(low) and high > low:
            label = None if labelled else "95 % interval"
            labelled = True
            ax.plot([low, high], [q, q], color=LIGHT, linewidth=5, zorder=1, label=label)
    if measured is not None:
        steps = np.sort(measured_steps(measured))
        share = np.arange(1, len(steps) + 1) / len(steps)
        ax.step(
            steps,
            share,
            where="post",
            color=ACCENT,
            linestyle="--",
            label=f"measured, {len(steps):,} steps",
        )
    plain_numbers(ax.xaxis)
    ax.set_ylim(0, 1.02)
    return finished(ax, xlabel="step time (s)", ylabel="probability of a faster step")
